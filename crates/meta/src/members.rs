//! Members: the data servers, as their heartbeats tell of them, over the [`Table`] that is written down.
//!
//! A server is recognised by the number that its store drew when made, so it keeps its identity when it comes back under
//! another address. It is up while it is heard; suspected when a heartbeat is overdue; down when it is silent for longer, so that
//! writers choose substitutes; and out when it is down for so long that its groups move to others. One that speaks but has no disk that
//! works is down too: a disk that hangs lets heartbeats through.
//!
//! # Invariants
//! - Up, down and out are records; figures and suspicion are not.
//! - A server that was down or out and comes back has its groups checked for missing pieces and itself for stale ones; one whose
//!   disk is lost has its groups checked, once more when every block that was put there before is committed or given up, and one whose disk is new or back is searched for stale pieces: what was deleted
//!   meanwhile was not told to that disk.
//! - One that was started anew has its groups checked too: what it lost with its last process nobody else knows.
//! - Who was down when the service started stays down until it is heard; who was up counts as up until it is silent for too long
//!   from then on, so a start raises no alarm.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use torchfs_proto::attr::Time;
use torchfs_proto::layout::{DiskInfo, Load, Placement, Room, Scheme, ServerInfo, ServerState};
use torchfs_proto::msg::block::SessionLoad;
use torchfs_proto::msg::meta::{BAD_MAX, Heartbeat};
use torchfs_proto::record::{self, ClusterCounters};
use torchfs_proto::{ClusterId, Code, Fault, LayoutId, Result, Seq, ServerId};

use crate::table::Table;

/// Most disks of one server.
const DISKS_MAX: usize = 256;
/// Most sessions in one heartbeat.
const SESSIONS_MAX: usize = 65_536;
/// Longest address, zone or path.
const TEXT_MAX: usize = 4_096;

/// The data servers and layouts.
#[derive(Debug)]
pub struct Members {
    /// What is written down.
    pub table: Table,
    /// The last batch that changed what clients and servers are told of it, or of a volume. Until that is durable, a restart
    /// could give the same version to another table.
    pub placed: Seq,
    live: BTreeMap<ServerId, Live>,
    /// Servers whose groups are looked at once more, and when.
    again: BTreeMap<ServerId, Instant>,
    /// When this service began: nobody was silent before that.
    began: Instant,
}

/// What heartbeats told since the service started.
#[derive(Clone, Debug)]
struct Live {
    heard: Instant,
    /// It said something since this service started.
    spoke: bool,
    reported: bool,
    placement: u64,
    total: u64,
    free: u64,
    used: u64,
    pieces: u64,
    disks: Vec<DiskInfo>,
    /// Since the server's start, and when that was told.
    done: Load,
    load: Load,
    sessions: Vec<SessionLoad>,
}

impl Members {
    /// Over a table that was loaded; servers count as heard until they are silent for too long.
    pub fn new(table: Table, now: Instant) -> Members {
        let live = table.servers.keys().map(|id| (*id, Live::silent(now))).collect();
        Members { table, placed: Seq(0), live, again: BTreeMap::new(), began: now }
    }

    /// Puts an edited table in the place of the one it was made from; this batch wrote it.
    pub fn take(&mut self, table: Table, seq: Seq) {
        if table.version != self.table.version {
            self.placed = seq;
        }
        self.table = table;
    }

    /// Whether this heartbeat makes sense.
    pub fn check(&self, cluster: ClusterId, beat: &Heartbeat) -> Result<()> {
        if beat.cluster.0 != 0 && beat.cluster != cluster {
            let what = format!("the disk of {} belongs to another cluster", beat.addr);
            return Err(
                Fault::new(Code::Denied, what).next("use an empty folder, or the cluster it belongs to")
            );
        }
        if let Some(other) = self.table.servers.get(&beat.server)
            && beat.server.0 != 0
            && other.store != beat.store
        {
            let what = format!("data server {} is another store", beat.server);
            return Err(Fault::new(Code::Denied, what));
        }
        let texts = beat.disks.iter().map(|disk| &disk.path).chain([&beat.addr, &beat.zone]);
        if beat.disks.len() > DISKS_MAX
            || beat.bad.len() > BAD_MAX
            || beat.sessions.len() > SESSIONS_MAX
            || texts.into_iter().any(|text| text.len() > TEXT_MAX)
        {
            return Err(Fault::new(Code::TooMany, format!("the heartbeat of {} tells too much", beat.addr)));
        }
        Ok(())
    }

    /// The server's number, if it is known.
    pub fn known(&self, beat: &Heartbeat) -> Option<ServerId> {
        self.table.servers.values().find(|server| server.store == beat.store).map(|server| server.id)
    }

    /// The batch in which the server got its number.
    pub fn joined(&self, beat: &Heartbeat) -> Seq {
        self.known(beat).and_then(|id| self.table.servers.get(&id)).map_or(Seq(0), |server| server.born)
    }

    /// The record that a heartbeat makes, if it differs.
    pub fn changed(&self, beat: &Heartbeat, wall: Time) -> Option<record::Server> {
        let known = self.known(beat).and_then(|id| self.table.servers.get(&id));
        let mut record = known.cloned().unwrap_or_else(|| record::Server {
            born: Seq(0),
            id: ServerId(0),
            store: beat.store,
            addr: String::new(),
            zone: String::new(),
            state: ServerState::Up,
            draining: false,
            total: 0,
            disks: Vec::new(),
            down_since: None,
            reconcile: beat.pieces > 0,
        });
        record.addr = beat.addr.clone();
        record.zone = beat.zone.clone();
        // Without a disk it is of no use, though it speaks.
        let idle = !beat.disks.is_empty() && !beat.disks.iter().any(DiskInfo::works);
        match beat.leaving || idle {
            true if record.state < ServerState::Down => {
                (record.state, record.down_since) = (ServerState::Down, Some(wall));
            }
            true => {}
            false => (record.state, record.down_since) = (ServerState::Up, None),
        }
        if !beat.disks.is_empty() {
            record.disks = beat.disks.iter().filter(|disk| !disk.failed).map(|disk| disk.id).collect();
            record.disks.sort_unstable();
        }
        // The weight is a figure that wobbles; only a change that matters is written down.
        if beat.total > 0 && beat.total.abs_diff(record.total) > record.total / 64 {
            record.total = beat.total;
        }
        (known != Some(&record)).then_some(record)
    }

    /// The server, if this heartbeat tells of a disk that is lost.
    pub fn loses_disk(&self, beat: &Heartbeat) -> Option<ServerId> {
        let server = self.table.servers.get(&self.known(beat)?)?;
        let has = |id: &u64| beat.disks.iter().any(|disk| disk.id == *id && !disk.failed);
        (!beat.disks.is_empty() && !server.disks.iter().all(has)).then_some(server.id)
    }

    /// The groups of this server are to be looked at once more at that time.
    pub fn look_again(&mut self, server: ServerId, at: Instant) {
        self.again.insert(server, at);
    }

    /// The servers whose groups are to be looked at once more now.
    pub fn take_due(&mut self, now: Instant) -> Vec<ServerId> {
        self.again.extract_if(.., |_, at| now >= *at).map(|(server, _)| server).collect()
    }

    /// Edits the table as a heartbeat asks for.
    pub fn edit(
        table: &mut Table,
        counters: &mut ClusterCounters,
        born: Seq,
        mut record: record::Server,
    ) -> ServerId {
        let Some(before) = table.servers.get(&record.id).cloned() else {
            record.id = ServerId(counters.next_server.max(1));
            record.born = born;
            counters.next_server = record.id.0 + 1;
            let id = record.id;
            table.servers.insert(id, record);
            table.widen(counters);
            return id;
        };
        let id = record.id;
        let returns = before.state >= ServerState::Down && record.state == ServerState::Up;
        let lost_disk = before.disks.iter().any(|disk| !record.disks.contains(disk));
        let other_disk = record.disks.iter().any(|disk| !before.disks.contains(disk));
        table.servers.insert(id, record);
        if returns || lost_disk {
            table.mark_server_dirty(id);
        }
        if returns || (other_disk && !before.disks.is_empty()) {
            table.mark_stale(id);
        }
        if returns {
            table.widen(counters);
        }
        id
    }

    /// Whether this is the first report of a process that serves: one that knows nothing of the placement yet.
    pub fn begins(&self, id: ServerId, beat: &Heartbeat) -> bool {
        let knew = |live: &Live| !live.reported || live.placement > 0;
        beat.total > 0 && beat.placement == 0 && self.live.get(&id).is_none_or(knew)
    }

    /// Takes in a heartbeat's figures.
    pub fn heard(&mut self, id: ServerId, beat: &Heartbeat, now: Instant) {
        let before = self.live.entry(id).or_insert_with(|| Live::silent(now));
        let elapsed_ms = now.saturating_duration_since(before.heard).as_millis().max(1) as u64;
        let per_second = |is: u64, was: u64| is.saturating_sub(was) * 1_000 / elapsed_ms;
        let known = before.reported;
        let load = Load {
            gets: per_second(beat.load.gets, before.done.gets),
            puts: per_second(beat.load.puts, before.done.puts),
            read_bytes: per_second(beat.load.read_bytes, before.done.read_bytes),
            written_bytes: per_second(beat.load.written_bytes, before.done.written_bytes),
            waiting: beat.load.waiting,
        };
        *before = Live {
            heard: now,
            spoke: true,
            // The first heartbeat of a new server comes before its store is open.
            reported: before.reported || beat.total > 0,
            placement: beat.placement,
            total: beat.total,
            free: beat.free,
            used: beat.used,
            pieces: beat.pieces,
            disks: beat.disks.clone(),
            done: beat.load,
            load: if known { load } else { Load::default() },
            sessions: beat.sessions.clone(),
        };
    }

    /// Servers that time has made down or out: (server, what it is now).
    pub fn silent(
        &self,
        timeout: Duration,
        out_after: Duration,
        wall_ms: i64,
        now: Instant,
    ) -> Vec<(ServerId, ServerState)> {
        let mut silent = Vec::new();
        for server in self.table.servers.values() {
            let heard = self.live.get(&server.id).map_or(self.began, |live| live.heard);
            match server.state {
                ServerState::Up | ServerState::Suspected if now >= heard + timeout => {
                    silent.push((server.id, ServerState::Down));
                }
                ServerState::Down => {
                    let since_ms = server.down_since.map_or(wall_ms, |since| since.secs * 1_000);
                    let down_ms = wall_ms.saturating_sub(since_ms);
                    let long = u128::from(down_ms.unsigned_abs()) >= out_after.as_millis() && down_ms >= 0;
                    // After a start everybody gets the time again.
                    if long && now >= self.began + out_after {
                        silent.push((server.id, ServerState::Out));
                    }
                }
                _ => {}
            }
        }
        silent
    }

    /// Nobody could be heard until now: the time does not count.
    pub fn all_heard(&mut self, now: Instant) {
        self.began = now;
        self.live.values_mut().for_each(|live| live.heard = now);
    }

    /// Nobody could be heard for so long until now: it does not count.
    pub fn deaf_for(&mut self, gap: Duration, now: Instant) {
        self.live.values_mut().for_each(|live| live.heard = now.min(live.heard + gap));
    }

    /// When this service began to hear servers.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// The servers as clients know them.
    pub fn servers(&self) -> Vec<ServerInfo> {
        let places = self.table.all_places(&BTreeSet::new());
        let info = |server: &record::Server| ServerInfo {
            groups: places.get(&server.id).copied().unwrap_or(0),
            ..self.info(server)
        };
        self.table.servers.values().map(info).collect()
    }

    /// The table as clients get it.
    pub fn placement(&self) -> Placement {
        Placement {
            version: self.table.version,
            layouts: self.table.layouts.values().cloned().collect(),
            servers: self.servers(),
        }
    }

    /// The servers as people see them.
    pub fn report(
        &self,
        suspect: Duration,
        to_repair: &BTreeMap<ServerId, u64>,
        idle: &BTreeSet<LayoutId>,
        now: Instant,
    ) -> Vec<ServerInfo> {
        let places = self.table.all_places(idle);
        let info = |server: &record::Server| {
            let mut info = self.info(server);
            info.groups = places.get(&server.id).copied().unwrap_or(0);
            if let Some(live) = self.live.get(&server.id) {
                info.disks = live.disks.clone();
                info.load = if server.state < ServerState::Down { live.load } else { Load::default() };
                // One that was up when this service stopped may have stopped meanwhile.
                if server.state == ServerState::Up && (now >= live.heard + suspect || !live.spoke) {
                    info.state = ServerState::Suspected;
                }
            }
            info.to_repair = to_repair.get(&server.id).copied().unwrap_or(0);
            info
        };
        self.table.servers.values().map(info).collect()
    }

    /// A server without its places: to count those takes a look at all groups.
    fn info(&self, server: &record::Server) -> ServerInfo {
        let live = self.live.get(&server.id);
        ServerInfo {
            id: server.id,
            addr: server.addr.clone(),
            up: server.state < ServerState::Down,
            total: live.map_or(0, |live| live.total).max(if live.is_some_and(|l| l.reported) {
                0
            } else {
                server.total
            }),
            free: live.map_or(0, |live| live.free),
            used: live.map_or(0, |live| live.used),
            pieces: live.map_or(0, |live| live.pieces),
            zone: server.zone.clone(),
            state: server.state,
            draining: server.draining,
            ..ServerInfo::default()
        }
    }

    /// Where the servers that are heard of listen.
    pub fn addresses(&self) -> BTreeMap<ServerId, String> {
        let up = self.table.servers.values().filter(|server| server.state < ServerState::Down);
        up.map(|server| (server.id, server.addr.clone())).collect()
    }

    /// What sessions did at each server, as last told.
    pub fn session_loads(&self) -> impl Iterator<Item = &SessionLoad> {
        self.live.values().flat_map(|live| &live.sessions)
    }

    /// The version of each group of each layout.
    pub fn group_versions(&self) -> Vec<(LayoutId, Vec<u32>)> {
        let layouts = self.table.layouts.values();
        layouts.map(|layout| (layout.id, layout.groups.iter().map(|group| group.version).collect())).collect()
    }

    /// The version of the table.
    pub fn version(&self) -> u64 {
        self.table.version
    }

    /// Pieces that servers reported to hold, in all.
    pub fn pieces(&self) -> u64 {
        self.live.values().map(|live| live.pieces).sum()
    }

    /// (total, free) bytes of content under this scheme that the servers have room for; as far as they reported. One that is
    /// down counts: it is expected back, and until then writers wait for it rather than hear that the disks are full.
    pub fn room(&self, scheme: Scheme) -> (u64, u64) {
        let parts = self.takers().filter_map(|server| {
            let live = self.live.get(&server.id)?;
            Some(ServerInfo { disks: live.disks.clone(), ..self.info(server) }.parts())
        });
        let Room { total, free, .. } = Room::of(parts.collect::<Vec<_>>().iter().flatten());
        let (data, width) = match scheme {
            Scheme::Replicas(n) => (1, u128::from(n.max(1))),
            Scheme::Ec { data, parity } => (u128::from(data), u128::from(data) + u128::from(parity)),
        };
        let off = |bytes: u64| (u128::from(bytes) * data / width.max(1)) as u64;
        (off(total), off(free))
    }

    /// The servers that new data may go to, now or as soon as they are back.
    fn takers(&self) -> impl Iterator<Item = &record::Server> {
        self.table.servers.values().filter(|server| server.state < ServerState::Out && !server.draining)
    }

    /// Whether there are as many servers as a block has pieces.
    pub fn enough(&self, scheme: Scheme) -> bool {
        self.takers().count() >= scheme.width()
    }

    /// Whether every server that counts as up has said what room it has since this service started.
    pub fn all_reported(&self) -> bool {
        let up = |server: &&record::Server| server.state < ServerState::Down;
        self.table.servers.values().filter(up).all(|s| self.live.get(&s.id).is_some_and(|live| live.reported))
    }

    /// The server is forgotten.
    pub fn forget(&mut self, server: ServerId) {
        self.live.remove(&server);
    }
}

impl Live {
    fn silent(now: Instant) -> Live {
        Live {
            heard: now,
            spoke: false,
            reported: false,
            placement: 0,
            total: 0,
            free: 0,
            used: 0,
            pieces: 0,
            disks: Vec::new(),
            done: Load::default(),
            load: Load::default(),
            sessions: Vec::new(),
        }
    }
}
