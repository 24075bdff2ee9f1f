//! The bytes of every message, written down: a change of numbers or order shows here before it shows between versions.
//!
//! `golden/v1.txt` has a line for each sample. A new message adds lines; a line that changes is a break of the wire.
//! `BLESS=1 cargo test -p torchfs-proto` writes the file anew.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::collections::BTreeMap;
use std::fmt::Debug;

use minicbor::{Decode, Encode};
use torchfs_proto::attr::*;
use torchfs_proto::chunk::ChunkInfo;
use torchfs_proto::extent::*;
use torchfs_proto::layout::*;
use torchfs_proto::msg::{self, block, decode, encode, meta};
use torchfs_proto::*;

/// Remembers samples and checks that each comes back as it went.
#[derive(Default)]
struct Golden(BTreeMap<String, String>);

impl Golden {
    fn add<T>(&mut self, name: &str, sample: T)
    where
        T: Encode<()> + for<'b> Decode<'b, ()> + PartialEq + Debug,
    {
        let bytes = encode(&sample);
        assert_eq!(decode::<T>(&bytes).unwrap(), sample, "{name} does not come back as it went");
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert!(self.0.insert(name.to_string(), hex).is_none(), "two samples are called {name}");
    }
}

fn raw(text: &str) -> Raw {
    text.as_bytes().to_vec().into()
}

fn attr() -> Attr {
    Attr {
        ino: Ino(7),
        kind: Kind::File,
        mode: 0o644,
        nlink: 1,
        uid: 1000,
        gid: 100,
        rdev: 0,
        size: 4096,
        stored: 4096,
        atime: Time { secs: -1, nanos: 5 },
        mtime: Time { secs: 2, nanos: 0 },
        ctime: Time { secs: 3, nanos: 999_999_999 },
        btime: Time { secs: 1, nanos: 1 },
        data_version: 9,
        change: 12,
        flags: flags::XATTRS,
        generation: 1,
        layout: None,
    }
}

fn block_source() -> Source {
    let id = BlockId { incarnation: 3, counter: 70_000 };
    Source::Block {
        id,
        offset: 65_536,
        block_len: 4 << 20,
        layout: LayoutId(2),
        substitutes: vec![(1, ServerId(4))],
    }
}

fn new_block() -> NewBlock {
    let id = BlockId { incarnation: 3, counter: 70_000 };
    NewBlock { id, len: 4 << 20, layout: LayoutId(2), substitutes: vec![], stored: 1 << 20, servers: vec![] }
}

fn placement() -> Placement {
    let group = Group { version: 1, servers: vec![ServerId(1), ServerId(2)], ..Group::default() };
    let scheme = Scheme::Ec { data: 4, parity: 2 };
    let layout =
        Layout { id: LayoutId(2), scheme, groups: vec![group], asked: Some(scheme), replaced_by: None };
    let server = ServerInfo {
        id: ServerId(1),
        addr: "h:1".into(),
        up: true,
        total: 10,
        free: 5,
        used: 3,
        pieces: 2,
        zone: "rack7".into(),
        ..ServerInfo::default()
    };
    Placement { version: 4, layouts: vec![layout], servers: vec![server] }
}

fn request(op: meta::Op) -> meta::Request {
    meta::Request {
        session: SessionId(5),
        epoch: 1,
        seq: 42,
        step: 0,
        watermark: 40,
        fence: Fence(6),
        op,
        made: None,
    }
}

fn reply(result: Result<meta::Done>) -> meta::Reply {
    let grants = vec![meta::Grant { ino: Ino(7), bits: meta::lease::ATTR | meta::lease::READ, number: 99 }];
    meta::Reply {
        fence: Fence(6),
        ordered: Seq(1000),
        durable: Seq(998),
        lease_epoch: 2,
        grants,
        result,
        bare: None,
    }
}

fn requests(golden: &mut Golden) {
    use meta::Op;
    let lock = meta::FileLock {
        kind: meta::LockKind::Posix,
        ty: meta::LockType::Write,
        owner: 77,
        pid: 12,
        start: 0,
        end: u64::MAX,
    };
    let who = meta::OpenSession {
        volume: "main".into(),
        host: "h".into(),
        pid: 2,
        mount: "/m".into(),
        version: "0.1.0".into(),
    };
    let make = meta::Make {
        parent: Ino(1),
        name: raw("n"),
        kind: Kind::Symlink,
        mode: 0o777,
        uid: 1,
        gid: 2,
        rdev: 0,
        target: raw("t"),
        exclusive: true,
        open: false,
    };
    let set = SetAttr {
        mode: Some(0o600),
        size: Some(10),
        atime: Some(SetTime::Now),
        mtime: Some(SetTime::At(Time { secs: 1, nanos: 2 })),
        kill_privileges: true,
        ..SetAttr::default()
    };
    let commit = meta::Commit {
        ino: Ino(7),
        grant: 99,
        blocks: vec![new_block()],
        ranges: vec![
            RangeOp::Write { offset: 0, len: 10, source: block_source() },
            RangeOp::Append { len: 3, source: Source::Inline(raw("abc")) },
            RangeOp::Punch { offset: 1, len: 2 },
            RangeOp::Truncate { size: 5 },
            RangeOp::Extend { size: 6 },
        ],
        mtime: Some(Time { secs: 8, nanos: 9 }),
        kill_privileges: false,
        expect: Some(vec![Extent { offset: 0, len: 4, source: Source::Hole }]),
        ends: None,
    };
    let heartbeat = meta::Heartbeat { store: 8, addr: "h:2".into(), zone: "z".into(), ..Default::default() };
    let copy = Op::CopyRange {
        from: Ino(7),
        from_offset: 0,
        to: Ino(8),
        to_offset: 4,
        len: 100,
        grant: 99,
        mtime: None,
    };
    let name = || raw("n");
    for (label, op) in [
        ("open_session", Op::OpenSession(who)),
        ("resume_session", Op::ResumeSession),
        ("reclaim", Op::Reclaim { leases: vec![(Ino(7), 3)], open: vec![Ino(7)], last: true }),
        ("renew", Op::Renew),
        ("close_session", Op::CloseSession),
        ("listen", Op::Listen { seen: 3, wait_ms: 1000 }),
        ("ack", Op::Ack { events: vec![(4, true)] }),
        ("grant_ids", Op::GrantIds { count: 4096 }),
        ("sync", Op::Sync { seq: Seq(1000) }),
        ("forget", Op::Forget { leases: vec![(Ino(7), 255, 99)] }),
        ("placement", Op::Placement),
        ("lookup", Op::Lookup { parent: Ino(1), name: name() }),
        ("getattr", Op::GetAttr { ino: Ino(7) }),
        ("setattr", Op::SetAttr { ino: Ino(7), set }),
        ("readlink", Op::ReadLink { ino: Ino(7) }),
        ("make", Op::Make(make)),
        ("link", Op::Link { ino: Ino(7), parent: Ino(1), name: name() }),
        ("unlink", Op::Unlink { parent: Ino(1), name: name(), idle: Some(Ino(7)) }),
        ("rmdir", Op::Rmdir { parent: Ino(1), name: name() }),
        (
            "rename",
            Op::Rename { parent: Ino(1), name: name(), new_parent: Ino(2), new_name: raw("m"), flags: 1 },
        ),
        ("readdir", Op::ReadDir { ino: Ino(1), cookie: 5, limit: 100, plus: true }),
        ("xattrs", Op::Xattrs { ino: Ino(7) }),
        ("setxattr", Op::SetXattr { ino: Ino(7), name: raw("user.a"), value: raw("v"), flags: 1 }),
        ("removexattr", Op::RemoveXattr { ino: Ino(7), name: raw("user.a") }),
        ("open_data", Op::OpenData { ino: Ino(7), write: true }),
        ("extents", Op::Extents { ino: Ino(7), from: 0, to: 4096 }),
        ("commit", Op::Commit(commit)),
        ("copy_range", copy),
        ("lock", Op::Lock { ino: Ino(7), lock: lock.clone(), wait: true }),
        ("get_lock", Op::GetLock { ino: Ino(7), lock }),
        ("release", Op::Release { inos: vec![Ino(7)] }),
        ("statfs", Op::StatFs),
        ("heartbeat", Op::Heartbeat(heartbeat)),
        ("status", Op::Status),
        ("sessions", Op::Sessions),
        ("evict", Op::Evict { session: SessionId(5) }),
        ("check", Op::Check { cursor: raw("") }),
        ("known_blocks", Op::KnownBlocks { blocks: vec![new_block().id] }),
        ("list_blocks", Op::ListBlocks { after: None, limit: 10 }),
        ("collect", Op::Collect),
        ("meta_status", Op::MetaStatus),
    ] {
        golden.add(&format!("meta.request.{label}"), request(op));
    }
}

fn replies(golden: &mut Golden) {
    use meta::Done;
    let volume = VolumeInfo {
        id: VolumeId(1),
        name: "main".into(),
        block_size: 4 << 20,
        compression: Compression::Lz4,
        layout: LayoutId(2),
    };
    let session = meta::SessionInfo {
        session: SessionId(5),
        epoch: 1,
        cluster: ClusterId(1 << 60),
        incarnation: Incarnation(3),
        lease_ms: 3000,
        session_ms: 60_000,
        volume,
        root: attr(),
        placement: placement(),
        reclaim: false,
        seq: 41,
    };
    let entry =
        meta::DirEntry { name: raw("n"), ino: Ino(7), kind: Kind::File, cookie: 5, attr: Some(attr()) };
    let events = vec![
        (1, meta::Event::Recall { ino: Ino(7), bits: 8, number: 99, names: vec![raw("n")] }),
        (2, meta::Event::Orphaned { ino: Ino(7) }),
        (3, meta::Event::Changed { ino: Ino(7) }),
    ];
    let extents = vec![Extent { offset: 0, len: 10, source: block_source() }];
    let range = IdRange { first: new_block().id, count: 4096 };
    for (label, done) in [
        ("ok", Done::Ok),
        ("session", Done::Session(session)),
        ("renewed", Done::Renewed { space: 1 << 40, placement: 4, volume: None }),
        ("events", Done::Events(events)),
        ("ids", Done::Ids(range)),
        ("placement", Done::Placement(placement())),
        ("entry", Done::Entry(Some(attr()))),
        ("no_entry", Done::Entry(None)),
        ("attr", Done::Attr(attr())),
        ("target", Done::Target(raw("t"))),
        ("made", Done::Made { attr: attr(), created: true }),
        ("removed", Done::Removed { attr: attr(), held: false }),
        ("renamed", Done::Renamed { attr: attr(), other: None, held: false }),
        ("entries", Done::Entries { entries: vec![entry], end: true }),
        ("xattrs", Done::Xattrs(vec![(raw("user.a"), raw("v"))])),
        ("opened", Done::Opened(attr())),
        ("extents", Done::Extents { extents, upto: 10, data_version: 9, size: 4096 }),
        ("committed", Done::Committed { attr: attr(), appended: vec![4096], copied: 0 }),
        ("lock_holder", Done::LockHolder(None)),
        ("use", Done::Use(meta::VolumeUse { total: 4, free: 3, inodes: 2, inodes_free: 1 })),
        (
            "joined",
            Done::Joined {
                server: ServerId(1),
                cluster: ClusterId(9),
                placement: 4,
                groups: vec![(LayoutId(2), vec![1, 3])],
            },
        ),
        ("checked", Done::Checked { problems: vec!["p".into()], cursor: raw("c"), records: 1, total: 2 }),
        ("known", Done::Known(vec![new_block().id])),
        ("blocks", Done::Blocks { blocks: vec![new_block()], end: true }),
        ("collected", Done::Collected { deleted: 1, waiting: 2 }),
        ("meta_status", Done::MetaStatus(meta_report())),
    ] {
        golden.add(&format!("meta.reply.{label}"), reply(Ok(done)));
    }
    admin_replies(golden);
    golden.add("meta.reply.fault", reply(Err(Fault::new(Code::NoSpace, "what").next("next"))));
}

fn meta_report() -> meta::MetaReport {
    let standby = meta::StandbyReport { addr: "h:2".into(), applied: Seq(4), replica_bytes: 8, silent_ms: 5 };
    meta::MetaReport {
        cluster: ClusterId(9),
        leader: "h:1".into(),
        since: Time { secs: 1, nanos: 2 },
        fence: Fence(3),
        incarnation: Incarnation(4),
        engine: "postgres".into(),
        ordered: Seq(7),
        durable: Seq(6),
        applied: Seq(5),
        replica_bytes: 10,
        replica_keys: 11,
        overlay_bytes: 12,
        log_bytes: 13,
        state_bytes: 14,
        standbys: vec![standby],
    }
}

fn blocks(golden: &mut Golden) {
    use block::{Op, Reply, Request};
    let id = new_block().id;
    let chunks = vec![ChunkInfo::default()];
    let (piece, layout) = (1, LayoutId(2));
    let put = Op::Put { block: id, piece, layout, group_version: 1, chunks: chunks.clone(), first: 16 };
    for (label, op) in [
        ("put", put),
        ("get", Op::Get { block: id, piece: 1, first: 0, count: 64 }),
        ("delete", Op::Delete { blocks: vec![id] }),
        ("purge", Op::Purge { range: IdRange { first: id, count: 9 }, keep: vec![id] }),
        ("list", Op::List { after: Some((id, 1)), limit: 10 }),
        ("stat", Op::Stat),
        ("verify", Op::Verify { block: id, piece: 1 }),
    ] {
        golden.add(&format!("block.request.{label}"), Request { session: 5, capability: None, op });
    }
    repair_blocks(golden, id);
    let piece = block::PieceInfo { block: id, piece: 1, layout: LayoutId(2), stored: 10 };
    golden.add("block.reply.done", Reply::Done);
    golden.add("block.reply.chunks", Reply::Chunks { chunks });
    golden.add("block.reply.listed", Reply::Listed { pieces: vec![piece], end: true });
    golden.add("block.reply.stat", Reply::Stat { total: 4, free: 3, used: 2, pieces: 1 });
}

/// Messages and nouns that came with repair, volumes and policies.
fn admin_requests(golden: &mut Golden) {
    use meta::{Op, VolumeOp};
    let ec = Scheme::Ec { data: 4, parity: 2 };
    let policy = meta::VolumePolicy {
        block_size: Some(1 << 20),
        compression: Some(Compression::Zstd),
        scheme: Some(ec),
        stripe: Some(8),
    };
    let named = || "train".to_string();
    let commit = meta::Commit {
        ino: Ino(7),
        grant: 99,
        blocks: vec![NewBlock { servers: vec![ServerId(2), ServerId(1)], ..new_block() }],
        ranges: vec![],
        mtime: None,
        kill_privileges: false,
        expect: None,
        ends: None,
    };
    let heartbeat = meta::Heartbeat {
        store: 8,
        addr: "h:2".into(),
        disks: vec![disk()],
        bad: vec![(new_block().id, 1)],
        load: load(),
        sessions: vec![session_load()],
        placement: 4,
        ..Default::default()
    };
    let bad = meta::BadPiece { block: new_block().id, piece: 1, server: ServerId(4) };
    for (label, op) in [
        ("commit_with_end", Op::Commit(meta::Commit { blocks: vec![], ends: Some(9), ..commit.clone() })),
        ("commit_with_servers", Op::Commit(commit)),
        (
            "heartbeat_with_silent_disk",
            Op::Heartbeat(meta::Heartbeat {
                disks: vec![DiskInfo { silent_ms: Some(16_000), ..disk() }],
                ..heartbeat.clone()
            }),
        ),
        ("heartbeat_with_disks", Op::Heartbeat(heartbeat)),
        (
            "set_policy",
            Op::SetPolicy { ino: Ino(7), policy: meta::Policy { scheme: Some(ec), stripe: Some(8) } },
        ),
        ("volume_list", Op::Volume(VolumeOp::List)),
        ("volume_create", Op::Volume(VolumeOp::Create { name: named(), policy })),
        ("volume_set", Op::Volume(VolumeOp::Set { name: named(), policy: Default::default() })),
        ("volume_remove", Op::Volume(VolumeOp::Remove { name: named(), force: true })),
        ("drain", Op::Drain { server: ServerId(4), on: true }),
        ("remove_server", Op::RemoveServer { server: ServerId(4), force: false }),
        ("rebalance", Op::Rebalance { auto: Some(false) }),
        ("scrub", Op::Scrub { on: true }),
        ("repair", Op::Repair { rate: Some(1 << 20) }),
        ("report_bad", Op::ReportBad { pieces: vec![bad] }),
        ("top", Op::Top),
        ("strays", Op::Strays { server: ServerId(4), pieces: vec![(new_block().id, 1)] }),
        ("list_files", Op::ListFiles { cursor: Raw::from(vec![9]), limit: 100 }),
        (
            "list_names",
            Op::ListNames {
                volume: VolumeId(2),
                folder: Ino(7),
                after: Raw::from(b"a".to_vec()),
                limit: 100,
            },
        ),
    ] {
        golden.add(&format!("meta.request.{label}"), request(op));
    }
}

fn admin_replies(golden: &mut Golden) {
    use meta::Done;
    let info = VolumeInfo {
        id: VolumeId(2),
        name: "train".into(),
        block_size: 1 << 20,
        compression: Compression::Zstd,
        layout: LayoutId(2),
    };
    let volume = meta::VolumeReport {
        info: info.clone(),
        scheme: Scheme::Replicas(3),
        asked: Some(Scheme::Ec { data: 4, parity: 2 }),
        stripe: 64,
        inodes: 1,
        blocks: 2,
        bytes: 3,
        stored: 4,
        sessions: 5,
        removed: false,
    };
    let repair = meta::RepairReport {
        dirty: 1,
        moving: 2,
        groups: 64,
        at_risk: 1,
        pass_done: 3,
        pass_total: 9,
        pieces_left: 4,
        pieces_done: 5,
        bytes_done: 6,
        rate: 7,
        rate_max: 8,
        lost: 1,
        lost_blocks: vec![new_block().id],
        auto_rebalance: true,
        drains: vec![meta::DrainReport {
            server: ServerId(4),
            groups: 3,
            pieces: 100,
            stuck: 2,
            moved: None,
        }],
        scrub: meta::ScrubReport { running: true, pieces: 1, total: 2, bytes: 3, bad: 4, last_end: 5 },
        dropped: 9,
        degraded: 3,
        balancing: true,
    };
    let top = meta::SessionTop { session: SessionId(5), who: None, ops: 42, load: session_load() };
    for (label, done) in [
        ("renewed_with_volume", Done::Renewed { space: 1 << 40, placement: 4, volume: Some(info) }),
        ("volumes", Done::Volumes(vec![volume])),
        ("repair", Done::Repair(repair)),
        (
            "repair_with_drain",
            Done::Repair(meta::RepairReport {
                drains: vec![meta::DrainReport {
                    server: ServerId(4),
                    moved: Some((70, 1 << 20)),
                    ..Default::default()
                }],
                ..Default::default()
            }),
        ),
        ("top", Done::Top(vec![top])),
        (
            "strays",
            Done::Strays(meta::Strays {
                orphans: vec![(new_block().id, 1)],
                leaving: vec![(new_block().id, 2)],
            }),
        ),
        (
            "files",
            Done::Files {
                files: vec![meta::FileBlocks {
                    volume: VolumeId(2),
                    ino: Ino(7),
                    parent: Ino(1),
                    named: true,
                    blocks: vec![new_block().id],
                }],
                cursor: Raw::from(vec![9]),
            },
        ),
        (
            "names",
            Done::Names {
                volume: "v".to_string(),
                parent: Ino(1),
                names: vec![(Ino(7), Raw::from(b"a".to_vec()))],
                end: true,
            },
        ),
        ("attr_with_layout", Done::Attr(Attr { layout: Some(LayoutId(2)), ..attr() })),
    ] {
        golden.add(&format!("meta.reply.{label}"), reply(Ok(done)));
    }
}

fn repair_blocks(golden: &mut Golden, id: BlockId) {
    use block::{Op, Reply, Request};
    let item = block::PullItem {
        block: id,
        piece: 1,
        layout: LayoutId(2),
        scheme: Scheme::Ec { data: 4, parity: 2 },
        block_len: 4 << 20,
        sources: vec![(0, "h:1".into())],
        verify: true,
    };
    for (label, op) in [
        ("missing", Op::Missing { pieces: vec![(id, 1)] }),
        ("pull", Op::Pull { items: vec![item], rate: 1 << 20 }),
        ("drop", Op::Drop { pieces: vec![(id, 1)] }),
        ("scrub", Op::Scrub { after: Some((id, 1)), limit: 10, rate: 0 }),
        ("sessions", Op::Sessions),
    ] {
        golden.add(&format!("block.request.{label}"), Request { session: 0, capability: None, op });
    }
    golden.add("block.reply.missing", Reply::Missing { pieces: vec![(id, 1)] });
    let failed = vec![(3, Fault::new(Code::Gone, "what"))];
    golden.add("block.reply.pulled", Reply::Pulled { failed, bytes: 10 });
    let scrubbed = Reply::Scrubbed { bad: vec![(id, 1)], after: Some((id, 2)), pieces: 7, bytes: 70 };
    golden.add("block.reply.scrubbed", scrubbed);
    golden.add("block.reply.sessions", Reply::Sessions { sessions: vec![session_load()] });
}

/// A group on the move, and a server with all its figures.
fn moving(golden: &mut Golden) {
    let group = Group {
        version: 7,
        servers: vec![ServerId(1)],
        moving_to: vec![ServerId(4)],
        dirty: true,
        former: vec![(0, ServerId(3))],
    };
    golden.add("layout.group", group);
    let server = ServerInfo {
        id: ServerId(4),
        state: ServerState::Out,
        draining: true,
        groups: 3,
        to_repair: 9,
        disks: vec![disk()],
        load: load(),
        ..ServerInfo::default()
    };
    golden.add("layout.server", server);
    let record = record::Server {
        born: Seq(9),
        id: ServerId(4),
        store: 8,
        addr: "h:2".into(),
        zone: "rack7".into(),
        state: ServerState::Down,
        draining: true,
        total: 10,
        disks: vec![77],
        down_since: Some(Time { secs: 3, nanos: 4 }),
        reconcile: true,
    };
    golden.add("record.server", record);
    let volume = record::Volume {
        born: Seq(9),
        id: VolumeId(2),
        name: "train".into(),
        block_size: 1 << 20,
        compression: Compression::Zstd,
        scheme: Some(Scheme::Replicas(3)),
        stripe: Some(8),
        removed: false,
    };
    golden.add("record.volume", volume);
    let scrub = record::Scrub {
        began: Time { secs: 3, nanos: 4 },
        cursors: vec![(ServerId(4), new_block().id, 1)],
        done: vec![ServerId(1)],
        pieces: 1,
        bytes: 2,
        bad: 3,
    };
    let repair = record::Repair {
        rate: 5,
        no_rebalance: true,
        scrub: Some(scrub.clone()),
        scrubbed: None,
        last: None,
        search_ms: None,
    };
    golden.add("record.repair", repair.clone());
    let scrubbed = Some(Time { secs: 5, nanos: 6 });
    golden.add(
        "record.repair_scrubbed",
        record::Repair { scrub: None, scrubbed, last: Some(scrub), ..repair.clone() },
    );
    golden.add("record.repair_searched", record::Repair { search_ms: Some(1_700_000_000_000), ..repair });
}

fn disk() -> DiskInfo {
    DiskInfo {
        id: 77,
        path: "/d".into(),
        total: 4,
        free: 3,
        used: 1,
        pieces: 2,
        failed: true,
        fault: "f".into(),
        fs: 9,
        fs_free: 2,
        fs_share: 1,
        silent_ms: None,
    }
}

fn load() -> Load {
    Load { gets: 1, puts: 2, read_bytes: 3, written_bytes: 4, waiting: 5 }
}

fn session_load() -> block::SessionLoad {
    block::SessionLoad { session: 5, gets: 1, puts: 2, read_bytes: 3, written_bytes: 4 }
}

#[test]
fn redundancy_is_written_and_read_as_people_do() {
    for text in ["replicas:1", "replicas:8", "ec:2+1", "ec:4+2", "ec:16+8"] {
        assert_eq!(text.parse::<Scheme>().unwrap().to_string(), text);
    }
    for text in ["", "replicas", "replicas:0", "replicas:9", "ec:4", "ec:1+1", "ec:4+0", "ec:17+1", "raid:5"]
    {
        assert!(text.parse::<Scheme>().is_err(), "{text} is no redundancy");
    }
}

#[test]
fn records_and_tables_of_before_still_decode() {
    // A group, a server and a volume as they were written before they had these fields.
    let group: Group = decode(&[0x83, 1, 0x81, 1, 0x80]).unwrap();
    assert!(!group.dirty && group.target() == [ServerId(1)]);
    let server: record::Server = decode(&[0x85, 9, 4, 8, 0x61, b'h', 0x60]).unwrap();
    assert_eq!((server.state, server.total, server.disks.len()), (ServerState::Up, 0, 0));
    let volume: record::Volume = decode(&[0x86, 9, 1, 0x61, b'm', 0x19, 0x10, 0, 1, 0xf6]).unwrap();
    assert_eq!((volume.stripe, volume.removed), (None, false));
}

fn dumps(golden: &mut Golden) {
    use block::{Op, Reply, Request};
    use dump::DumpName;
    use msg::dump::{DumpInfo, DumpOp, DumpReport};
    let name = DumpName { incarnation: Incarnation(3), seq: Seq(1000), wall_ms: 70_000 };
    for (label, op) in [
        ("put", DumpOp::Put { name, offset: 4096, end: None }),
        ("put_end", DumpOp::Put { name, offset: 4096, end: Some(9) }),
        ("list", DumpOp::List),
        ("get", DumpOp::Get { name, offset: 4096, len: 100 }),
        ("delete", DumpOp::Delete { names: vec![name] }),
    ] {
        let op = Op::Dump(op);
        golden.add(&format!("block.request.dump_{label}"), Request { session: 5, capability: None, op });
    }
    golden.add("block.reply.dumps", Reply::Dumps(vec![DumpInfo { name, len: 5000 }]));
    golden.add("block.reply.dump_part", Reply::DumpPart { total: 5000 });
    golden.add("meta.request.dump", request(meta::Op::Dump { cursor: raw("c") }));
    let dumped = meta::Done::Dumped { bytes: raw("b"), cursor: raw("c"), pairs: 1, total: 2 };
    golden.add("meta.reply.dumped", reply(Ok(dumped)));
    let report = DumpReport { every_s: 3600, newest_ms: Some(1), copies: 3, bytes: 9, failure: "f".into() };
    golden.add("dump.report", report);
    let restored = record::Restored {
        born: Seq(9),
        from: Seq(8),
        dumped: Time { secs: 1, nanos: 2 },
        loaded: Time { secs: 3, nanos: 4 },
        incarnation: Incarnation(70_000),
        swept: vec![ServerId(1)],
    };
    golden.add("record.restored", restored);
}

fn samples() -> BTreeMap<String, String> {
    let mut golden = Golden::default();
    dumps(&mut golden);
    requests(&mut golden);
    admin_requests(&mut golden);
    moving(&mut golden);
    replies(&mut golden);
    blocks(&mut golden);
    golden.0
}

#[test]
fn messages_keep_their_bytes() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v1.txt");
    let now = samples();
    if std::env::var_os("BLESS").is_some() {
        let text: String = now.iter().map(|(name, hex)| format!("{name} {hex}\n")).collect();
        std::fs::create_dir_all(std::path::Path::new(path).parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let text = std::fs::read_to_string(path).unwrap();
    let written: BTreeMap<String, String> =
        text.lines().filter_map(|l| l.split_once(' ')).map(|(a, b)| (a.into(), b.into())).collect();
    for (name, hex) in &now {
        assert_eq!(written.get(name), Some(hex), "the bytes of {name} are not those written down");
    }
    assert_eq!(written.len(), now.len(), "samples are missing");
}

#[test]
fn damaged_messages_are_refused_or_read_but_never_break_the_reader() {
    let (seed, rounds) = (torchfs_fuzz::seed(1), torchfs_fuzz::rounds(100, 2_000));
    // xorshift: enough to flip bytes, and the same everywhere.
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for hex in samples().values() {
        let bytes: Vec<u8> =
            (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
        for _ in 0..rounds {
            let mut bytes = bytes.clone();
            for _ in 0..1 + next() % 4 {
                let at = (next() % bytes.len() as u64) as usize;
                match next() % 3 {
                    0 => bytes[at] = next() as u8,
                    1 => bytes.truncate(at.max(1)),
                    _ => bytes.insert(at, next() as u8),
                }
            }
            let _ = decode::<meta::Request>(&bytes);
            let _ = decode::<meta::Reply>(&bytes);
            let _ = decode::<block::Request>(&bytes);
            let _ = decode::<block::Reply>(&bytes);
        }
    }
}

#[test]
fn a_huge_length_takes_no_memory() {
    // An array that claims 2^60 elements, in the place of each message.
    let bytes = [0x9b, 0x10, 0, 0, 0, 0, 0, 0, 0, 0x01];
    assert!(decode::<meta::Request>(&bytes).is_err());
    assert!(decode::<Vec<BlockId>>(&bytes).is_err());
    let bytes = [0x5b, 0x10, 0, 0, 0, 0, 0, 0, 0, 0x01];
    assert!(decode::<Raw>(&bytes).is_err());
}

#[test]
fn every_fault_code_has_an_errno() {
    for code in Code::ALL {
        assert!(code.errno() > 0);
    }
}
