//! Members: the data servers, whether they are up, and the layouts over them.
//!
//! A server is recognised by the number that its store drew when made, so it keeps its identity when it comes back under
//! another address. When a server joins, a new layout over all servers is made for new blocks; old blocks keep theirs.
//!
//! # Invariants
//! - The placement's version rises with every change, durably.
//! - Records change in the caller's batch; what is in memory follows when the batch is ordered.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use torchfs_proto::layout::{Layout, Placement, Scheme, ServerInfo, ServerState};
use torchfs_proto::msg::meta::Heartbeat;
use torchfs_proto::record::{self, LayoutRecord};
use torchfs_proto::{BlockId, ClusterId, Code, Fault, LayoutId, Result, ServerId, key};

use crate::placement;
use crate::view::View;

/// The data servers and layouts.
#[derive(Debug, Default)]
pub struct Members {
    servers: BTreeMap<ServerId, Member>,
    layouts: BTreeMap<LayoutId, Layout>,
    version: u64,
}

#[derive(Clone, Debug)]
struct Member {
    record: record::Server,
    /// The last heartbeat, or the start of this service.
    heard: Instant,
    up: bool,
    total: u64,
    free: u64,
    used: u64,
    pieces: u64,
}

/// What a heartbeat or the passing of time changes.
#[derive(Clone, Debug)]
pub struct Change {
    server: Member,
    layout: Option<Layout>,
    version: u64,
}

impl Members {
    /// Takes in what the store has; servers count as up until they are silent for too long.
    pub fn load(view: &View<'_>, counters: &record::ClusterCounters, now: Instant) -> Result<Members> {
        let mut members = Members { version: counters.placement, ..Members::default() };
        let all = key::space(key::CLUSTER, key::Space::Server);
        for (_, record) in view.list::<record::Server>(&all, usize::MAX)? {
            let server = Member { heard: now, up: true, total: 0, free: 0, used: 0, pieces: 0, record };
            members.servers.insert(server.record.id, server);
        }
        let all = key::space(key::CLUSTER, key::Space::Layout);
        for (_, record) in view.list::<LayoutRecord>(&all, usize::MAX)? {
            members.layouts.insert(record.layout.id, record.layout);
        }
        Ok(members)
    }

    /// Decides on a heartbeat; the records it changes are written into the view. [`Members::apply`] it when ordered.
    pub fn heard(
        &self,
        view: &mut View<'_>,
        counters: &mut record::ClusterCounters,
        cluster: ClusterId,
        beat: &Heartbeat,
        policy: (Option<Scheme>, u32),
        now: Instant,
    ) -> Result<Change> {
        if beat.cluster.0 != 0 && beat.cluster != cluster {
            let what = format!("the disk of {} belongs to another cluster", beat.addr);
            return Err(
                Fault::new(Code::Denied, what).next("use an empty folder, or the cluster it belongs to")
            );
        }
        let known = self.servers.values().find(|server| server.record.store == beat.store);
        if let Some(other) = self.servers.get(&beat.server)
            && beat.server.0 != 0
            && other.record.store != beat.store
        {
            let what = format!("data server {} is another store", beat.server);
            return Err(Fault::new(Code::Denied, what));
        }
        let mut version = self.version;
        let mut layout = None;
        let record = match known {
            Some(server) => {
                record::Server { addr: beat.addr.clone(), zone: beat.zone.clone(), ..server.record.clone() }
            }
            None => {
                let id = ServerId(counters.next_server.max(1));
                counters.next_server = id.0 + 1;
                let mut ids: Vec<ServerId> = self.servers.keys().copied().collect();
                ids.push(id);
                let next = LayoutId(counters.next_layout.max(1));
                counters.next_layout = next.0 + 1;
                let made = placement::layout(next, placement::scheme(policy.0, ids.len()), &ids, policy.1);
                let record = LayoutRecord { born: view.born, layout: made.clone() };
                view.put(key::layout(next), &record);
                layout = Some(made);
                record::Server {
                    born: view.born,
                    id,
                    store: beat.store,
                    addr: beat.addr.clone(),
                    zone: beat.zone.clone(),
                    state: ServerState::Up,
                    draining: false,
                    total: 0,
                    disks: Vec::new(),
                    down_since: None,
                    reconcile: false,
                }
            }
        };
        let up = !beat.leaving;
        if known.is_none_or(|known| known.record != record) {
            view.put(key::server(record.id), &record);
        }
        if known.is_none_or(|known| known.record != record || known.up != up) {
            version += 1;
            counters.placement = version;
            view.put(key::cluster_counters(), &*counters);
        }
        let (total, free, used, pieces) = (beat.total, beat.free, beat.used, beat.pieces);
        let server = Member { record, heard: now, up, total, free, used, pieces };
        Ok(Change { server, layout, version })
    }

    /// A server that was silent for too long, with the change that says so.
    pub fn silent(
        &self,
        view: &mut View<'_>,
        counters: &mut record::ClusterCounters,
        timeout: Duration,
        now: Instant,
    ) -> Option<Change> {
        let silent = self.servers.values().find(|server| server.up && now >= server.heard + timeout)?;
        let version = self.version + 1;
        counters.placement = version;
        view.put(key::cluster_counters(), &*counters);
        Some(Change { server: Member { up: false, ..silent.clone() }, layout: None, version })
    }

    /// Nobody could be heard until now: the time does not count.
    pub fn all_heard(&mut self, now: Instant) {
        self.servers.values_mut().for_each(|server| server.heard = now);
    }

    /// The change was ordered.
    pub fn apply(&mut self, change: Change) -> ServerId {
        let id = change.server.record.id;
        self.servers.insert(id, change.server);
        self.version = change.version;
        if let Some(layout) = change.layout {
            self.layouts.insert(layout.id, layout);
        }
        id
    }

    /// The table as clients get it.
    pub fn placement(&self) -> Placement {
        Placement {
            version: self.version,
            layouts: self.layouts.values().cloned().collect(),
            servers: self.servers(),
        }
    }

    /// The servers as people see them.
    pub fn servers(&self) -> Vec<ServerInfo> {
        let info = |server: &Member| ServerInfo {
            id: server.record.id,
            addr: server.record.addr.clone(),
            up: server.up,
            total: server.total,
            free: server.free,
            used: server.used,
            pieces: server.pieces,
            zone: server.record.zone.clone(),
            state: if server.up { ServerState::Up } else { ServerState::Down },
            ..ServerInfo::default()
        };
        self.servers.values().map(info).collect()
    }

    /// The version of each group of each layout.
    pub fn group_versions(&self) -> Vec<(LayoutId, Vec<u32>)> {
        let versions = |layout: &Layout| layout.groups.iter().map(|group| group.version).collect();
        self.layouts.values().map(|layout| (layout.id, versions(layout))).collect()
    }

    /// The version of the table.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The layout for new blocks; 0 before any server has joined.
    pub fn newest(&self) -> LayoutId {
        self.layouts.keys().next_back().copied().unwrap_or_default()
    }

    /// The redundancy of new blocks.
    pub fn scheme(&self) -> Scheme {
        self.layouts.values().next_back().map_or(Scheme::Replicas(1), |layout| layout.scheme)
    }

    /// (total, free) bytes of content that the servers have room for, redundancy taken off; as far as they reported.
    pub fn room(&self) -> (u64, u64) {
        let up = || self.servers.values().filter(|server| server.up);
        let (total, free) = (up().map(|s| s.total).sum::<u64>(), up().map(|s| s.free).sum::<u64>());
        match self.scheme() {
            Scheme::Replicas(n) => (total / u64::from(n.max(1)), free / u64::from(n.max(1))),
            Scheme::Ec { data, parity } => {
                let (data, width) = (u128::from(data), u128::from(data) + u128::from(parity));
                let off = |bytes: u64| (u128::from(bytes) * data / width.max(1)) as u64;
                (off(total), off(free))
            }
        }
    }

    /// Whether every server that counts as up has said what room it has since this service started.
    pub fn all_reported(&self) -> bool {
        self.servers.values().all(|server| !server.up || server.total > 0)
    }

    /// Every server that may hold a piece of this block.
    pub fn holders(&self, id: BlockId, layout: LayoutId, substitutes: &[(u8, ServerId)]) -> Vec<ServerId> {
        let mut holders: Vec<ServerId> = substitutes.iter().map(|(_, server)| *server).collect();
        if let Some(layout) = self.layouts.get(&layout)
            && let Some(group) = layout.groups.get(layout.group_of(id))
        {
            holders.extend(&group.servers);
            holders.extend(&group.moving_to);
        }
        holders.sort_unstable();
        holders.dedup();
        holders.retain(|server| self.servers.contains_key(server));
        holders
    }
}
