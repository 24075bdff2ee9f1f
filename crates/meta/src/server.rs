//! The service on the wire, and the thread and task that keep it going.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use futures_util::future::BoxFuture;
use torchfs_proto::msg::block::PullItem;
use torchfs_proto::msg::{self, meta};
use torchfs_proto::{BlockId, Code, Fault, IdRange, Result};
use torchfs_rpc::{Answer, Answering, Peer, Request, Service};

use crate::deleter::BlockPeers;
use crate::repair::{Asking, Listed, PieceAt, Pulled, RepairPeers, ScrubPart, Scrubbed};
use crate::service::Meta;

impl Service for Meta {
    fn call(self: Arc<Self>, _peer: Peer, request: Request) -> Answering {
        if request.method != meta::method::META {
            let fault = Fault::new(Code::Unsupported, "this is the address of a metadata service")
                .next("where a data server is asked for, give the address of `torchfs data`");
            return Box::pin(async move { Err(fault) });
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

impl RepairPeers for torchfs_client::Peers {
    fn missing<'a>(&'a self, addr: &'a str, pieces: Vec<PieceAt>) -> Asking<'a, Vec<PieceAt>> {
        Box::pin(torchfs_client::Peers::missing(self, addr, pieces))
    }

    fn pull<'a>(
        &'a self,
        addr: &'a str,
        items: Vec<PullItem>,
        rate: u64,
        limit: Duration,
    ) -> Asking<'a, Pulled> {
        Box::pin(async move {
            let (failed, bytes) = torchfs_client::Peers::pull(self, addr, items, rate, limit).await?;
            Ok(Pulled { failed, bytes })
        })
    }

    fn forget<'a>(&'a self, addr: &'a str, pieces: Vec<PieceAt>) -> Asking<'a, ()> {
        Box::pin(torchfs_client::Peers::forget(self, addr, pieces))
    }

    fn list<'a>(&'a self, addr: &'a str, after: Option<PieceAt>, limit: u32) -> Asking<'a, Listed> {
        Box::pin(torchfs_client::Peers::list(self, addr, after, limit))
    }

    fn scrub<'a>(&'a self, addr: &'a str, part: ScrubPart, limit: Duration) -> Asking<'a, Scrubbed> {
        Box::pin(async move {
            let ScrubPart { after, pieces, rate } = part;
            let part = torchfs_client::Peers::scrub(self, addr, after, pieces, rate, limit).await?;
            Ok(Scrubbed { bad: part.bad, after: part.after, pieces: part.pieces, bytes: part.bytes })
        })
    }
}

/// What runs beside the requests: a thread for what time brings, and tasks that have dead blocks deleted, missing pieces
/// pulled, and stored ones checked. Dropping it stops them and joins the thread.
pub struct Background {
    meta: Arc<Meta>,
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
    tasks: [tokio::task::JoinHandle<()>; 3],
}

impl Background {
    /// Starts them; needs a runtime around it.
    pub fn start(meta: Arc<Meta>, peers: Arc<dyn RepairPeers>) -> Result<Background> {
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
        let (scrubbing, reading) = (meta.clone(), peers.clone());
        let scrub = tokio::spawn(async move {
            loop {
                let ran = scrubbing.scrub(&*reading).await;
                tokio::time::sleep(if ran { every } else { every * 10 }).await;
            }
        });
        let (repairing, pulling) = (meta.clone(), peers.clone());
        let repair = tokio::spawn(async move {
            loop {
                let did = repairing.repair(&*pulling).await;
                tokio::time::sleep(if did { every / 10 } else { every * 4 }).await;
            }
        });
        let deleting = meta.clone();
        let deleter = tokio::spawn(async move {
            loop {
                let did = deleting.collect(&*peers).await;
                let pause = if did > 0 { every } else { every * 10 };
                tokio::time::sleep(pause).await;
            }
        });
        Ok(Background { meta, stop, thread: Some(thread), tasks: [deleter, repair, scrub] })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.meta.stop();
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the upkeep thread panicked");
            }
        }
    }
}

impl Meta {
    /// Waits until all that could be read until now is durable. Whoever tells servers to remove what no record names waits
    /// here in between: they do not get it back when a power cut takes the batch that unnamed it.
    pub(crate) async fn settled(&self) -> Result<()> {
        let limit = Duration::from_millis(u64::from(self.config().peer_timeout_ms));
        match tokio::time::timeout(limit, self.durable(self.engine.ordered())).await {
            Ok(result) => result,
            Err(_) => Err(Fault::new(Code::Timeout, "the log does not become durable")),
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
