//! A future that is finished in the background when its caller goes away.
//!
//! A change that was sent happens whether or not somebody waits for the answer, and what the answer means for our caches
//! must not be missed. So each change, together with what follows from its answer, is one future, and an interrupted
//! caller leaves it to the session's tasks instead of dropping it. A future that is ready at the first poll costs no task.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use torchfs_client::Meta;

pub(crate) struct Finish<T: Send + 'static> {
    future: Option<BoxFuture<'static, T>>,
    meta: Arc<Meta>,
}

impl<T: Send + 'static> Finish<T> {
    pub(crate) fn new(meta: &Arc<Meta>, future: impl Future<Output = T> + Send + 'static) -> Finish<T> {
        Finish { future: Some(Box::pin(future)), meta: meta.clone() }
    }
}

impl<T: Send + 'static> Future for Finish<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let Some(future) = self.future.as_mut() else { return Poll::Pending };
        match future.as_mut().poll(cx) {
            Poll::Ready(value) => {
                self.future = None;
                Poll::Ready(value)
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: Send + 'static> Drop for Finish<T> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take() {
            self.meta.spawn(async move {
                let _ = future.await;
            });
        }
    }
}
