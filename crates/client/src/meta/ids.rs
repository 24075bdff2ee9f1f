//! Block ids from ranges that the service gave to this session, asked for ahead of need.
//!
//! # Invariants
//! - An id is given out once, and only from a range whose grant is durable: a range that is lost with its leader would
//!   leave blocks under ids that the next leader never gave.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use torchfs_proto::msg::meta::{Done, Op};
use torchfs_proto::{BlockId, Code, Fault, IdRange, Result};

use super::session::Shared;

/// The ids at hand.
#[derive(Default)]
pub(crate) struct Ids(Mutex<Stock>);

#[derive(Default)]
struct Stock {
    ranges: VecDeque<IdRange>,
    left: u64,
    filling: bool,
    /// How often filling failed, and why the last time.
    failures: u64,
    fault: Option<Fault>,
}

impl Ids {
    /// Nothing will be filled any more.
    pub fn fail(&self, fault: &Fault) {
        let mut stock = self.0.lock();
        stock.ranges.clear();
        stock.left = 0;
        stock.failures += 1;
        stock.fault = Some(fault.clone());
    }
}

impl Stock {
    fn take(&mut self) -> Option<BlockId> {
        let range = self.ranges.front_mut()?;
        let id = range.first;
        range.first.counter += 1;
        range.count -= 1;
        if range.count == 0 {
            self.ranges.pop_front();
        }
        self.left -= 1;
        Some(id)
    }
}

impl Shared {
    /// A fresh id, see [`super::Meta::block_id`].
    pub async fn block_id(self: &Arc<Shared>) -> Result<BlockId> {
        let until = Instant::now() + self.config.op_timeout;
        let failures = self.ids.0.lock().failures;
        loop {
            let mut progress = std::pin::pin!(self.progress.notified());
            progress.as_mut().enable();
            {
                let mut stock = self.ids.0.lock();
                let id = stock.take();
                if stock.left < u64::from(self.config.ids_per_grant) / 2 && !stock.filling {
                    if id.is_none() && stock.failures > failures {
                        return Err(stock.fault.clone().unwrap_or_else(|| Code::Internal.into()));
                    }
                    stock.filling = true;
                    let shared = self.clone();
                    self.spawn_own(async move { shared.fill_ids().await });
                }
                if let Some(id) = id {
                    return Ok(id);
                }
            }
            if let Some(fault) = self.ended() {
                return Err(fault);
            }
            self.within(until, progress).await?;
        }
    }

    async fn fill_ids(self: &Arc<Shared>) {
        let range = self.grant_ids().await;
        {
            let mut stock = self.ids.0.lock();
            stock.filling = false;
            match range {
                Ok(range) if range.count > 0 => {
                    stock.left += u64::from(range.count);
                    stock.ranges.push_back(range);
                }
                Ok(_) => {
                    stock.failures += 1;
                    stock.fault = Some(Fault::new(Code::Protocol, "the metadata service gave no block ids"));
                }
                Err(fault) => {
                    stock.failures += 1;
                    stock.fault = Some(fault);
                }
            }
        }
        self.progress.notify_waiters();
    }

    async fn grant_ids(self: &Arc<Shared>) -> Result<IdRange> {
        let changed = self.change(Op::GrantIds { count: self.config.ids_per_grant }).await?;
        self.durable(changed.seq.0, Instant::now() + self.config.op_timeout).await?;
        match changed.done {
            Done::Ids(range) => Ok(range),
            other => Err(super::unexpected("GrantIds", &other)),
        }
    }
}
