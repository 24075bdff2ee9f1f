//! A data server's membership: it reports to the metadata service every second, and learns its number, its cluster and the
//! versions of placement groups so.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use torchfs_proto::msg::meta::{Done, Heartbeat, Op};
use torchfs_proto::{ClusterId, Code, Fault, LayoutId, Result, ServerId};

use crate::meta::unexpected;
use crate::tool::Leader;
use crate::{Connector, ToolConfig};

/// Settings of [`Member`].
#[derive(Clone, Debug)]
pub struct MemberConfig {
    /// How often to report.
    pub every: Duration,
    /// How the service is asked.
    pub tool: ToolConfig,
}

impl Default for MemberConfig {
    fn default() -> MemberConfig {
        let second = Duration::from_secs(1);
        let tool = ToolConfig {
            timeout: 5 * second,
            attempt_timeout: 2 * second,
            pause: second / 10,
            ..ToolConfig::default()
        };
        MemberConfig { every: second, tool }
    }
}

/// Who a data server is to its cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Its number.
    pub server: ServerId,
    /// Its cluster.
    pub cluster: ClusterId,
}

/// What a data server tells, and what it makes of the answer. Both are called every second, so they have to be quick.
pub trait Reports: Send + Sync {
    /// The figures of the next report.
    fn figures(&self) -> Heartbeat;

    /// The metadata service has heard a report. It told the placement's version and, if the report knew an older one, the
    /// version of each group of each layout.
    fn heard(&self, _report: &Heartbeat, _placement: u64, _groups: Vec<(LayoutId, Vec<u32>)>) {}
}

impl<F: Fn() -> Heartbeat + Send + Sync> Reports for F {
    fn figures(&self) -> Heartbeat {
        self()
    }
}

/// Whoever reports.
pub type Figures = Arc<dyn Reports>;

/// A running membership.
pub struct Member {
    leader: Arc<Leader>,
    figures: Figures,
    identity: watch::Receiver<Option<Identity>>,
    refused: watch::Receiver<Option<Fault>>,
    stop: Arc<Notify>,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Member {
    /// Begins to report. The number and cluster that the service gives are put into later reports where `figures` leaves
    /// them 0, and can be read with [`Member::identity`].
    pub fn start(
        addrs: &[String],
        connector: &dyn Connector,
        config: MemberConfig,
        runtime: &Handle,
        figures: Figures,
    ) -> Member {
        let leader = Arc::new(Leader::new(addrs, connector, config.tool.clone()));
        let (tell, identity) = watch::channel(None);
        let (refuse, refused) = watch::channel(None);
        let stop = Arc::new(Notify::new());
        let task = runtime.spawn({
            let (leader, figures, stop) = (leader.clone(), figures.clone(), stop.clone());
            async move {
                let stopped = std::pin::pin!(stop.notified());
                let reporting = std::pin::pin!(report(&leader, &figures, &tell, &refuse, config.every));
                futures_util::future::select(stopped, reporting).await;
            }
        });
        Member { leader, figures, identity, refused, stop, task: Mutex::new(Some(task)) }
    }

    /// Waits until the cluster has taken this server in.
    pub async fn identity(&self) -> Option<Identity> {
        let mut identity = self.identity.clone();
        let known = identity.wait_for(Option::is_some).await.ok()?;
        *known
    }

    /// Ends if the cluster refuses this server before it ever took it in: it belongs to another one, or has another secret.
    pub async fn refused(&self) -> Fault {
        let mut refused = self.refused.clone();
        let fault = refused.wait_for(Option::is_some).await.ok().and_then(|fault| fault.clone());
        match fault {
            Some(fault) => fault,
            None => std::future::pending().await,
        }
    }

    /// Says goodbye and stops reporting.
    pub async fn leave(&self) -> Result<()> {
        self.stop.notify_one();
        let task = self.task.lock().take();
        if let Some(task) = task {
            // An error is a panic of the task, which is in the log already.
            let _ = task.await;
        }
        let mut beat = beat(&self.figures, *self.identity.borrow());
        beat.leaving = true;
        self.leader.ask(Op::Heartbeat(beat)).await.map(|_| ())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(task) = self.task.lock().take() {
            task.abort();
        }
    }
}

async fn report(
    leader: &Leader,
    figures: &Figures,
    tell: &watch::Sender<Option<Identity>>,
    refuse: &watch::Sender<Option<Fault>>,
    every: Duration,
) {
    let mut silent = false;
    loop {
        let beat = beat(figures, *tell.borrow());
        let result = match leader.ask(Op::Heartbeat(beat.clone())).await {
            Ok(Done::Joined { server, cluster, placement, groups }) => {
                figures.heard(&beat, placement, groups);
                Ok(Identity { server, cluster })
            }
            Ok(other) => Err(unexpected("Heartbeat", &other)),
            Err(fault) => Err(fault),
        };
        match result {
            Ok(identity) => {
                if silent {
                    tracing::info!("the metadata service hears this server again");
                    silent = false;
                }
                tell.send_if_modified(|known| known.replace(identity) != Some(identity));
            }
            Err(fault) => {
                // One that was taken in once goes on serving, whatever the service says: its pieces are needed.
                if fault.code == Code::Denied && tell.borrow().is_none() {
                    refuse.send_replace(Some(fault.clone()));
                }
                if !silent {
                    tracing::warn!("the metadata service does not hear this server: {fault}");
                    silent = true;
                }
            }
        }
        tokio::time::sleep(every).await;
    }
}

fn beat(figures: &Figures, identity: Option<Identity>) -> Heartbeat {
    let mut beat = figures.figures();
    if let Some(identity) = identity {
        if beat.server == ServerId(0) {
            beat.server = identity.server;
        }
        if beat.cluster == ClusterId(0) {
            beat.cluster = identity.cluster;
        }
    }
    beat
}
