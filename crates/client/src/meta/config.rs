//! Settings of a session; every timer is a field.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use torchfs_proto::msg::meta::OpenSession;

use crate::Connector;

/// Settings of [`crate::Meta`].
#[derive(Clone)]
pub struct MetaConfig {
    /// HOST:PORT of every metadata server.
    pub addrs: Vec<String>,
    /// How they are reached.
    pub connector: Arc<dyn Connector>,
    /// Who we are.
    pub who: OpenSession,
    /// Where timers and tasks live.
    pub runtime: Handle,
    /// How long opening the session waits for a service that answers.
    pub open_timeout: Duration,
    /// How long a call waits for a silent service.
    pub op_timeout: Duration,
    /// One attempt to connect, or to go on with the session, may take so long.
    pub attempt_timeout: Duration,
    /// With several metadata servers: one that leaves a renewal unanswered for so long is left for the others.
    pub silence_max: Duration,
    /// A lock that is waited for is asked for anew after so long: while it waits, later results are kept at the service.
    pub lock_wait: Duration,
    /// The pause before a request is repeated, or the addresses are gone through again.
    pub pause: Duration,
    /// How long the service may wait for events before it answers that there are none.
    pub listen: Duration,
    /// How long leases and orphans that are given back are gathered before they are told.
    pub gather: Duration,
    /// Orphans whose release was refused are told again after this.
    pub refused_pause: Duration,
    /// How long tasks may take to end when the session is closed.
    pub close_timeout: Duration,
    /// Block ids asked for at a time.
    pub ids_per_grant: u32,
    /// Changes above the watermark, that is from the first that is not known to be durable; further ones wait.
    pub ledger_max: usize,
    /// So many more for those that other sessions wait for. The service must keep `ledger_max` and this many results for a
    /// session.
    pub ledger_reserve: usize,
    /// Changes told again to a new leader before the first answer is waited for.
    pub replay_window: usize,
    /// Recalls remembered for replies that are on their way.
    pub recalls_max: usize,
}

impl MetaConfig {
    /// The usual settings.
    pub fn new(addrs: Vec<String>, connector: Arc<dyn Connector>, runtime: Handle) -> MetaConfig {
        MetaConfig {
            addrs,
            connector,
            who: OpenSession::default(),
            runtime,
            open_timeout: Duration::from_secs(300),
            op_timeout: Duration::from_secs(300),
            attempt_timeout: Duration::from_secs(10),
            silence_max: Duration::from_secs(3),
            lock_wait: Duration::from_secs(1),
            pause: Duration::from_millis(50),
            listen: Duration::from_secs(10),
            gather: Duration::from_millis(20),
            refused_pause: Duration::from_secs(5),
            close_timeout: Duration::from_secs(10),
            ids_per_grant: 4096,
            ledger_max: 2_048,
            ledger_reserve: 2_048,
            replay_window: 256,
            recalls_max: 65_536,
        }
    }
}

impl fmt::Debug for MetaConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetaConfig")
            .field("addrs", &self.addrs)
            .field("who", &self.who)
            .finish_non_exhaustive()
    }
}
