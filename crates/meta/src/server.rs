//! The service on the wire, and the thread and task that keep it going.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use futures_util::future::BoxFuture;
use torchfs_proto::msg::{self, meta};
use torchfs_proto::{BlockId, Code, Fault, IdRange, Result};
use torchfs_rpc::{Answer, Answering, Peer, Request, Service};

use crate::deleter::BlockPeers;
use crate::service::Meta;

impl Service for Meta {
    fn call(self: Arc<Self>, _peer: Peer, request: Request) -> Answering {
        if request.method != meta::method::META {
            let what = format!("the metadata service has no method {}", request.method);
            return Box::pin(async move { Err(Fault::new(Code::Unsupported, what)) });
        }
        Box::pin(async move {
            let request: meta::Request = msg::decode(&request.body)?;
            let mut reply = self.handle(request).await;
            if let Ok(meta::Done::Dumped { cursor, .. }) = &reply.result {
                // Reading much takes a while: outside of everybody's way.
                reply.result = crate::dumps::server::piece(self, cursor.clone()).await;
            }
            Ok(Answer::new(msg::encode(&reply)))
        })
    }
}

impl BlockPeers for torchfs_client::Peers {
    fn delete<'a>(&'a self, addr: &'a str, blocks: Vec<BlockId>) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { torchfs_client::Peers::delete(self, addr, &blocks).await })
    }

    fn purge<'a>(&'a self, addr: &'a str, range: IdRange, keep: Vec<BlockId>) -> BoxFuture<'a, Result<()>> {
        Box::pin(torchfs_client::Peers::purge(self, addr, range, keep))
    }
}

/// What runs beside the requests: a thread for what time brings, a task that has dead blocks deleted. Dropping it stops and
/// joins the thread.
pub struct Background {
    meta: Arc<Meta>,
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
    deleter: tokio::task::JoinHandle<()>,
}

impl Background {
    /// Starts both; needs a runtime around it.
    pub fn start(meta: Arc<Meta>, peers: Arc<dyn BlockPeers>) -> Result<Background> {
        let stop = Arc::new(AtomicBool::new(false));
        let every = Duration::from_millis(u64::from(meta.config().tick_ms.max(1)));
        let (ticking, stopped) = (meta.clone(), stop.clone());
        let thread = thread::Builder::new()
            .name("meta-upkeep".into())
            .spawn(move || {
                while !stopped.load(Ordering::Acquire) {
                    ticking.tick();
                    thread::park_timeout(every);
                }
            })
            .map_err(|e| Fault::new(Code::Internal, format!("cannot start the upkeep thread: {e}")))?;
        let deleting = meta.clone();
        let deleter = tokio::spawn(async move {
            loop {
                let did = deleting.collect(&*peers).await;
                let pause = if did > 0 { every } else { every * 10 };
                tokio::time::sleep(pause).await;
            }
        });
        Ok(Background { meta, stop, thread: Some(thread), deleter })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.meta.stop();
        self.deleter.abort();
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the upkeep thread panicked");
            }
        }
    }
}

/// A call to a data server with a deadline.
pub(crate) fn within<'a, T: Send + 'a>(
    limit: Duration,
    call: BoxFuture<'a, Result<T>>,
) -> BoxFuture<'a, Result<T>> {
    Box::pin(async move {
        match tokio::time::timeout(limit, call).await {
            Ok(result) => result,
            Err(_) => Err(Fault::new(Code::Timeout, "a data server did not answer")),
        }
    })
}
