//! Opening a store: checks what it is, makes it if it is new, and takes in what memory needs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::Mutex;
use torchfs_engine::Engine;
use torchfs_proto::attr::{Kind, Time};
use torchfs_proto::clock::Clock;
use torchfs_proto::record::{self, ClusterCounters, Counters, Format, LOADING, MAGIC, MUST_KNOW, VERSION};
use torchfs_proto::{Ino, Seq, SessionId, VolumeId, key};

use super::replay::load_outcomes;
use super::sessions::{Session, load_ranges};
use super::signals::{Board, Signals};
use super::{Chore, Grace, Meta, State};
use crate::config::Config;
use crate::dumps::Dumps;
use crate::error::Error;
use crate::leases::Leases;
use crate::members::Members;
use crate::namespace::Progress;
use crate::repair::Repairs;
use crate::rests::Rests;
use crate::table::Table;
use crate::view::View;

/// The volume that every store has.
const DEFAULT_VOLUME: VolumeId = VolumeId(1);

impl Meta {
    /// Opens the store below an engine. Sessions found there are given a lease term to report.
    pub fn open(engine: Arc<dyn Engine>, clock: Arc<dyn Clock>, config: Config) -> Result<Meta, Error> {
        let wall_ns = clock.wall_ns();
        let now = clock.now();
        check_format(&*engine, wall_ns, &config)?;
        let view = View::new(&*engine, key::CLUSTER, wall_ns, 0);
        let cluster: ClusterCounters = view.get(&key::cluster_counters())?.unwrap_or_default();
        let members = Members::new(Table::load(&view, &cluster)?, now);
        let settings = view.get::<record::Repair>(&key::repair())?.unwrap_or_default();
        let repairs = Repairs::new(settings);
        let mut volumes = BTreeMap::new();
        for (_, volume) in
            view.list::<record::Volume>(&key::space(key::CLUSTER, key::Space::Volume), usize::MAX)?
        {
            volumes.insert(volume.id, volume);
        }
        // Lease epochs rise across restarts: the fence does, and leaves room for those of one run.
        let first_epoch = (engine.fence().0 as u32).wrapping_mul(1 << 12) | 1;
        let mut leases = Leases::new(config.lease_term(), config.known_max, first_epoch);
        let mut sessions = BTreeMap::new();
        let mut chores = VecDeque::new();
        chores.extend(volumes.values().filter(|volume| volume.removed).map(|volume| Chore::Empty(volume.id)));
        for volume in volumes.keys().copied() {
            load_volume(&view, volume, now, &mut leases, &mut sessions, &mut chores)?;
        }
        let replaying: BTreeSet<VolumeId> =
            sessions.values().map(|session: &Session| session.volume).collect();
        for volume in replaying {
            let mut view = View::new(&*engine, volume, wall_ns, 0);
            view.count(|counters| counters.next_ino += config.ino_gap)?;
            view.frees = true;
            engine.order(view.into_batch())?;
        }
        let grace = (!sessions.is_empty())
            .then(|| Grace { earliest: now + config.lease_term(), latest: now + config.session_term() });
        if !sessions.is_empty() {
            tracing::info!(sessions = sessions.len(), "waiting for sessions to report what they hold");
        }
        let dumps = Dumps::load(&view, &config)?;
        drop(view);
        let board = Arc::new(Board::default());
        let told = board.clone();
        engine.on_durable(Box::new(move |how_far| told.tell(how_far)));
        let told = board.clone();
        engine.on_lead(Box::new(move || told.lead()));
        let state = State {
            sessions,
            leases,
            rests: Rests::default(),
            signals: Signals::default(),
            members,
            repairs,
            reshaped: None,
            volumes,
            cluster,
            waiters: Vec::new(),
            chores,
            grace,
            noted: None,
            ticked: None,
            deaf: false,
            deleted: 0,
            deleted_upto: BTreeMap::new(),
            check: None,
            dumps,
            stopped: false,
        };
        let since = Time::from_ns(wall_ns);
        Ok(Meta { engine, clock, config, since, board, state: Mutex::new(state) })
    }
}

/// Checks the first record, or writes a new store with its default volume.
fn check_format(engine: &dyn Engine, wall_ns: i64, config: &Config) -> Result<(), Error> {
    let mut view = View::new(engine, key::CLUSTER, wall_ns, 0);
    if let Some(format) = view.get::<Format>(&key::format())? {
        if format.magic != MAGIC {
            return Err(Error::Magic { found: format.magic });
        }
        if format.must_know & LOADING != 0 {
            return Err(Error::Unfinished);
        }
        if format.version > VERSION || format.must_know & !MUST_KNOW != 0 {
            let (version, must_know) = (format.version, format.must_know);
            return Err(Error::Version { version, must_know, known: VERSION });
        }
        if format.cluster != engine.cluster() {
            return Err(Error::Cluster { found: format.cluster, log: engine.cluster() });
        }
        return Ok(());
    }
    let now = Time::from_ns(wall_ns);
    let format = Format {
        magic: MAGIC,
        version: VERSION,
        must_know: MUST_KNOW,
        may_know: 0,
        cluster: engine.cluster(),
        made: now,
    };
    view.put(key::format(), &format);
    let volume = record::Volume {
        born: view.born,
        id: DEFAULT_VOLUME,
        name: config.volume.clone(),
        block_size: config.block_size,
        compression: config.compression,
        scheme: None,
        stripe: None,
        removed: false,
    };
    view.put(key::volume(DEFAULT_VOLUME), &volume);
    view.put(key::cluster_counters(), &ClusterCounters::default());
    let root = root(view.born, now);
    view.put(key::inode(DEFAULT_VOLUME, Ino::ROOT), &root);
    let counters = Counters { next_ino: Ino::ROOT.0 + 1, inodes: 1, ..Counters::default() };
    view.put(key::counters(DEFAULT_VOLUME), &counters);
    let seq = engine.order(view.into_batch())?;
    engine.wait_durable(seq, std::time::Duration::from_secs(60))?;
    Ok(())
}

/// The root folder of a new volume.
pub(super) fn root(born: Seq, now: Time) -> record::Inode {
    record::Inode {
        born,
        kind: Kind::Dir,
        mode: 0o755,
        uid: 0,
        gid: 0,
        nlink: 2,
        size: 0,
        stored: 0,
        atime: now,
        mtime: now,
        ctime: now,
        btime: now,
        data_version: 1,
        change: 1,
        flags: 0,
        parent: Ino::ROOT,
        generation: 1,
        layout: None,
        quota: None,
        rdev: None,
        target: None,
        next_cookie: None,
        entries: None,
        cut: None,
    }
}

fn load_volume(
    view: &View<'_>,
    volume: VolumeId,
    now: std::time::Instant,
    leases: &mut Leases,
    sessions: &mut BTreeMap<SessionId, Session>,
    chores: &mut VecDeque<Chore>,
) -> Result<(), Error> {
    let all = key::space(volume, key::Space::Session);
    for (at, record) in view.list::<record::Session>(&all, usize::MAX)? {
        let Some(id) = key::Parts::of(&at).and_then(|parts| parts.u64_at(0)).map(SessionId) else { continue };
        let mut session = Session::new(volume, record, now, false);
        session.ranges = load_ranges(view, volume, id)?;
        session.outcomes = load_outcomes(view, volume, id)?;
        session.last_seq = session.outcomes.last().map_or(0, |(seq, _)| *seq);
        leases.join(id, volume, now, true);
        sessions.insert(id, session);
    }
    let locks = key::space(volume, key::Space::Lock);
    view.scan(&locks, &key::after(&locks), false, &mut |at, _: record::Lock| {
        if let Some(parts) = key::Parts::of(at)
            && let (Some(ino), Some(id)) = (parts.u64_at(0), parts.u64_at(9))
        {
            let unlock = Chore::Unlock((volume, Ino(ino)), SessionId(id));
            match sessions.get_mut(&SessionId(id)) {
                Some(session) => {
                    session.locked.insert(Ino(ino));
                }
                // Its session has ended, and not all of its locks went with it. Those of one file follow each other, mostly.
                None if chores.back() != Some(&unlock) => chores.push_back(unlock),
                None => {}
            }
        }
        ControlFlow::Continue(())
    })?;
    // The sweep puts orphans that nobody holds on the list of chores.
    chores.push_back(Chore::Sweep(volume, Ino(0)));
    let cuts = key::space(volume, key::Space::Cut);
    view.scan(&cuts, &key::after(&cuts), false, &mut |at, _: u64| {
        if let Some(ino) = key::Parts::of(at).and_then(|parts| parts.u64_at(0)) {
            chores.push_back(Chore::Trim((volume, Ino(ino)), Progress::default()));
        }
        ControlFlow::Continue(())
    })?;
    Ok(())
}
