//! An engine that tells what was read: for tests of how much a piece of work looks at.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use torchfs_engine::{Batch, Embedded, Engine, EngineSpace, OnDurable, Result, Stats, Visit};
use torchfs_meta::{Config, Meta};
use torchfs_proto::{ClusterId, Fence, Incarnation, Seq};

use crate::world::World;

/// One scan: where it began, and how many pairs it showed.
pub type Scan = (Vec<u8>, usize);

pub struct Watched {
    inner: Arc<Embedded>,
    scans: Mutex<Vec<Scan>>,
}

impl Watched {
    /// A world with this engine in between.
    pub fn world(config: Config) -> (World, Arc<Watched>) {
        let mut world = World::with(config);
        let engine = Arc::new(Watched { inner: world.engine.clone(), scans: Mutex::default() });
        let meta = Meta::open(engine.clone(), world.clock.clone(), world.config.clone()).unwrap();
        world.meta = Arc::new(meta);
        (world, engine)
    }

    /// The scans since the last call.
    pub fn scans(&self) -> Vec<Scan> {
        std::mem::take(&mut *self.scans.lock())
    }
}

impl Engine for Watched {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.inner.get(key)
    }

    fn scan(&self, from: &[u8], to: &[u8], reverse: bool, visit: &mut Visit<'_>) -> Result<()> {
        let mut shown = 0;
        let result = self.inner.scan(from, to, reverse, &mut |key, value| -> ControlFlow<()> {
            shown += 1;
            visit(key, value)
        });
        self.scans.lock().push((from.to_vec(), shown));
        result
    }

    fn order(&self, batch: Batch) -> Result<Seq> {
        self.inner.order(batch)
    }

    fn ordered(&self) -> Seq {
        self.inner.ordered()
    }

    fn durable(&self) -> Seq {
        self.inner.durable()
    }

    fn hurry(&self, seq: Seq) {
        self.inner.hurry(seq)
    }

    fn wait_durable(&self, seq: Seq, timeout: Duration) -> Result<()> {
        self.inner.wait_durable(seq, timeout)
    }

    fn on_durable(&self, tell: OnDurable) {
        self.inner.on_durable(tell)
    }

    fn snapshot(&self, visit: &mut Visit<'_>) -> Result<Seq> {
        self.inner.snapshot(visit)
    }

    fn fence(&self) -> Fence {
        self.inner.fence()
    }

    fn incarnation(&self) -> Incarnation {
        self.inner.incarnation()
    }

    fn cluster(&self) -> ClusterId {
        self.inner.cluster()
    }

    fn space(&self) -> Result<EngineSpace> {
        self.inner.space()
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}
