//! The engine over a real PostgreSQL: the promises of every engine, lost answers, standbys, a database that went back.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use torchfs_engine::postgres::{PostgresConfig, Standby, Turn};
use torchfs_engine::{Batch, Config, Engine, Error, LogEngine, Result, Seq, conformance};
use torchfs_tests::proxy::{Loss, Proxy};
use torchfs_tests::{Database, Rng, Sandbox, eventually, seed};

const LONG: Duration = Duration::from_secs(60);
/// What every append of the log contains.
const RECORD: &[u8] = b"TFLR";

fn config(url: &str) -> PostgresConfig {
    PostgresConfig {
        url: url.to_owned(),
        address: "127.0.0.1:1".into(),
        poll: Duration::from_millis(20),
        ..PostgresConfig::default()
    }
}

/// Follows until it leads.
fn lead(dir: &Path, config: PostgresConfig) -> Result<LogEngine> {
    let standby = Standby::open(dir, config)?;
    Ok(standby.run(&mut |_| ControlFlow::Continue(()))?.expect("nobody told it to stop"))
}

fn put(key: &str, value: impl Into<Vec<u8>>) -> Batch {
    let mut batch = Batch::at(1);
    batch.put(key, value);
    batch
}

fn store(engine: &dyn Engine, key: &str, value: &str) -> Seq {
    let seq = engine.order(put(key, value)).unwrap();
    engine.wait_durable(seq, LONG).unwrap();
    seq
}

fn pairs(engine: &dyn Engine) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut visit = |key: &[u8], value: &[u8]| {
        found.insert(key.to_vec(), value.to_vec());
        ControlFlow::Continue(())
    };
    engine.scan(b"", b"\xff", false, &mut visit).unwrap();
    found
}

fn keep_promises(engine: impl Fn() -> Config) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let sandbox = Sandbox::new();
    let database = Database::start(&sandbox);
    for (name, promise) in conformance::all() {
        println!("{name}");
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let url = database.create(&format!("promise_{number}"));
        let dir = sandbox.folder(&format!("replica-{number}"));
        promise(&|| {
            let config = PostgresConfig { engine: engine(), ..config(&url) };
            Ok(Box::new(lead(&dir, config)?) as Box<dyn Engine>)
        });
    }
}

#[test]
fn the_engine_on_postgresql_keeps_the_promises_of_every_engine() {
    keep_promises(Config::default);
}

#[test]
fn the_engine_on_postgresql_keeps_them_with_small_bounds() {
    keep_promises(|| Config {
        checkpoint_keys: 50,
        checkpoint_bytes: 8 << 10,
        overlay_bytes: 64 << 10,
        queue_bytes: 16 << 10,
        group_bytes: 4 << 10,
        ..Config::default()
    });
}

#[test]
fn a_commit_with_unknown_outcome_is_resolved_and_not_guessed() {
    let sandbox = Sandbox::new();
    let database = Database::start(&sandbox);
    database.create("torchfs");
    let proxy = Proxy::start(&database.address(), RECORD);
    let url = format!("postgres://postgres@{}/torchfs", proxy.address());
    let dir = sandbox.folder("replica");
    let engine = lead(&dir, config(&url)).unwrap();
    let mut rng = Rng::new(seed(70));
    let losses = [Loss::Request, Loss::Answer, Loss::Both];
    for round in 0..30u64 {
        let loss = losses[(round % 3) as usize];
        proxy.lose(loss);
        let many = rng.range(1, 20);
        let mut last = Seq(0);
        for n in 0..many {
            last = engine.order(put(&format!("{round}.{n}"), "x")).unwrap();
        }
        engine.wait_durable(last, LONG).unwrap_or_else(|e| panic!("{loss:?} in round {round}: {e}"));
        assert_eq!(proxy.lost(), round + 1, "nothing was lost in round {round}");
    }
    let (fence, ordered, state) = (engine.fence(), engine.ordered(), pairs(&engine));
    drop(engine);
    // Every batch is there once: the places go on without a gap, and the state is the same for whoever builds it anew.
    let engine = lead(&sandbox.folder("fresh"), config(&url)).unwrap();
    assert_eq!(engine.fence().0, fence.0 + 1, "somebody led in between");
    assert_eq!(engine.ordered(), ordered);
    assert!(pairs(&engine) == state);
}

#[test]
fn the_state_is_built_anew_from_pairs_and_log_at_any_moment() {
    let sandbox = Sandbox::new();
    let database = Database::start(&sandbox);
    let url = database.create("torchfs");
    let small = PostgresConfig {
        log_keep: Duration::ZERO,
        fetch_bytes: 2000,
        state_keys: 7,
        engine: Config { checkpoint_keys: 40, ..Config::default() },
        ..config(&url)
    };
    let mut rng = Rng::new(seed(71));
    let mut model = BTreeMap::new();
    for round in 0..12 {
        // Now and then a leader begins with an empty folder, and leaders change folders.
        let dir = match round % 4 {
            3 => sandbox.folder(&format!("fresh-{round}")),
            n => sandbox.folder(&format!("replica-{}", n % 2)),
        };
        let engine = lead(&dir, small.clone()).unwrap();
        assert!(pairs(&engine) == model, "round {round}");
        for _ in 0..rng.range(1, 300) {
            let mut batch = Batch::at(1);
            for _ in 0..rng.range(1, 4) {
                let key = format!("k{}", rng.below(300)).into_bytes();
                if rng.chance(1, 3) {
                    model.remove(&key);
                    batch.delete(key);
                } else {
                    let value = rng.bytes(20);
                    model.insert(key.clone(), value.clone());
                    batch.put(key, value);
                }
            }
            engine.order(batch).unwrap();
            if rng.chance(1, 60) {
                engine.checkpoint().unwrap();
            }
        }
    }
}

#[test]
fn pairs_that_the_database_lost_in_a_crash_are_brought_forward_again() {
    let sandbox = Sandbox::new();
    // Commits of pairs return before they are durable; here nothing makes them durable for seconds.
    let settings = ["wal_writer_delay=10000ms", "autovacuum=off"];
    let mut database = Database::prepare(&sandbox, "pg", &settings);
    database.restart();
    let url = database.create("torchfs");
    let engine = Config { checkpoint_interval: Duration::from_secs(600), ..Config::default() };
    let quiet = PostgresConfig { lease: Duration::from_secs(60), state_keys: 2, engine, ..config(&url) };
    let engine = lead(&sandbox.folder("a"), quiet.clone()).unwrap();
    let as_of = |database: &Database| database.sql("torchfs", "SELECT applied FROM torchfs_state");
    store(&engine, "first", "1");
    engine.checkpoint().unwrap();
    for n in 0..5 {
        store(&engine, &format!("second {n}"), "2");
    }
    let before = as_of(&database);
    engine.checkpoint().unwrap();
    assert_ne!(as_of(&database), before);
    database.kill();
    database.restart();
    assert_eq!(as_of(&database), before, "the crash took nothing away");
    store(&engine, "third", "3");
    eventually("a checkpoint", || engine.checkpoint().map_err(|error| error.to_string()));
    let state = pairs(&engine);
    drop(engine);
    let fresh = lead(&sandbox.folder("b"), quiet).unwrap();
    assert!(pairs(&fresh) == state, "the pairs lack {} batches", before);
}

#[test]
fn a_standby_follows_and_leads_when_the_leader_gives_up_the_lead() {
    let sandbox = Sandbox::new();
    let database = Database::start(&sandbox);
    let url = database.create("torchfs");
    let leader = lead(&sandbox.folder("a"), config(&url)).unwrap();
    let mut standby = Standby::open(sandbox.folder("b"), config(&url)).unwrap();
    for n in 0..50 {
        store(&leader, &format!("k{n:02}"), "v");
    }
    eventually("the standby to have it all", || {
        assert_eq!(standby.follow().unwrap(), Turn::Follow, "it leads beside a living leader");
        if standby.seen() == leader.durable() { Ok(()) } else { Err(format!("{}", standby.seen())) }
    });
    let (fence, incarnation, last) = (leader.fence(), leader.incarnation(), leader.ordered());
    drop(leader);
    assert_eq!(standby.follow().unwrap(), Turn::Lead, "a lead given up is not waited for");
    let engine = standby.lead().unwrap().unwrap_or_else(|_| panic!("nobody else is there"));
    assert!(engine.fence() > fence && engine.incarnation() > incarnation);
    assert_eq!(engine.ordered(), last);
    assert_eq!(pairs(&engine).len(), 50);
    store(&engine, "more", "v");
}

#[test]
fn an_old_leader_commits_nothing_after_a_takeover_and_knows_it() {
    let sandbox = Sandbox::new();
    let database = Database::start(&sandbox);
    database.create("torchfs");
    let direct = database.url("torchfs");
    let proxy = Proxy::start(&database.address(), RECORD);
    let url = format!("postgres://postgres@{}/torchfs", proxy.address());
    let quick = |url: &str| PostgresConfig {
        lease: Duration::from_millis(400),
        margin: Duration::from_millis(100),
        ..config(url)
    };
    // Ticks an hour apart: only the append finds out.
    let old =
        lead(&sandbox.folder("a"), PostgresConfig { lease: Duration::from_secs(5), ..quick(&url) }).unwrap();
    let seq = store(&old, "k", "old");
    // The database is told that the term was short, so that the takeover need not be waited for.
    database.sql("torchfs", "UPDATE torchfs_head SET address = ''");
    let new = lead(&sandbox.folder("b"), quick(&direct)).unwrap();
    assert_eq!(new.ordered(), seq);
    let doomed = old.order(put("k", "late")).unwrap();
    let error = old.wait_durable(doomed, LONG).unwrap_err();
    assert!(matches!(error, Error::Deposed { .. }), "{error}");
    assert!(!old.leads());
    assert!(matches!(old.order(put("k", "later")), Err(Error::Deposed { .. })));
    assert_eq!(new.get(b"k").unwrap().as_deref(), Some(&b"old"[..]));
    drop(old);
    assert!(new.leads(), "an old leader's end took the lead away");
    store(&new, "k", "new");
    drop(new);
    // The old leader's folder never held what was not durable, and goes on from there.
    let again = lead(&sandbox.folder("a"), quick(&direct)).unwrap();
    assert_eq!(again.get(b"k").unwrap().as_deref(), Some(&b"new"[..]));
}

#[test]
fn a_lease_ends_with_the_connection_and_comes_back_with_it() {
    let sandbox = Sandbox::new();
    let mut database = Database::start(&sandbox);
    let url = database.create("torchfs");
    let quick = PostgresConfig { lease: Duration::from_millis(500), ..config(&url) };
    let engine = lead(&sandbox.folder("a"), quick).unwrap();
    store(&engine, "k", "1");
    for how in ["connections cut", "paused", "stopped", "killed"] {
        let seq =
            match how {
                "connections cut" => {
                    database.cut_connections("torchfs");
                    engine.order(put("k", how)).unwrap()
                }
                "paused" => {
                    database.signal_all(libc::SIGSTOP);
                    let seq = engine.order(put("k", how)).unwrap();
                    eventually("the lease to end", || {
                        if engine.leads() { Err("it leads".into()) } else { Ok(()) }
                    });
                    database.signal_all(libc::SIGCONT);
                    seq
                }
                _ => {
                    if how == "killed" {
                        database.kill()
                    } else {
                        database.stop()
                    }
                    let seq = engine.order(put("k", how)).unwrap();
                    eventually("the lease to end", || {
                        if engine.leads() { Err("it leads".into()) } else { Ok(()) }
                    });
                    database.restart();
                    seq
                }
            };
        engine.wait_durable(seq, LONG).unwrap_or_else(|e| panic!("{how}: {e}"));
        eventually("the lease to come back", || if engine.leads() { Ok(()) } else { Err("not yet".into()) });
    }
    drop(engine);
    let engine = lead(&sandbox.folder("b"), config(&url)).unwrap();
    assert_eq!(engine.get(b"k").unwrap().as_deref(), Some(&b"killed"[..]));
}

#[test]
fn a_database_that_went_back_in_time_is_refused_with_a_sentence() {
    let sandbox = Sandbox::new();
    let mut database = Database::start(&sandbox);
    let url = database.create("torchfs");
    let dir = sandbox.folder("a");
    let engine = lead(&dir, config(&url)).unwrap();
    store(&engine, "k", "1");
    drop(engine);
    database.stop();
    let old = database.copy_to("backup");
    database.restart();
    let engine = lead(&dir, config(&url)).unwrap();
    for n in 0..10 {
        store(&engine, "k", &n.to_string());
    }
    engine.checkpoint().unwrap();
    // Under a running leader.
    database.stop();
    database.put_back(&old);
    database.restart();
    // It may have noticed by itself already.
    let lost = engine.order(put("k", "lost")).and_then(|seq| engine.wait_durable(seq, LONG));
    let error = lost.unwrap_err().to_string();
    assert!(error.contains("restored from an older state"), "{error}");
    drop(engine);
    // At the next start.
    let refused = |what: &str| match Standby::open(&dir, config(&url)) {
        Err(error @ Error::BackInTime { .. }) => {
            let error = error.to_string();
            assert!(error.contains("went back in time") && error.contains("remove their folders"), "{error}");
        }
        Err(error) => panic!("{what}: {error}"),
        Ok(_) => panic!("{what}: a database that went back was taken"),
    };
    refused("right after");
    // When another server has gone on from the old state, with as many batches and more.
    let other = lead(&sandbox.folder("b"), config(&url)).unwrap();
    for n in 0..20 {
        store(&other, "k", &format!("other {n}"));
    }
    drop(other);
    refused("after others went on");
    // What the sentence says works.
    std::fs::remove_dir_all(&dir).unwrap();
    let engine = lead(&dir, config(&url)).unwrap();
    assert_eq!(engine.get(b"k").unwrap().as_deref(), Some(&b"other 19"[..]));
}

#[test]
fn a_standby_takes_in_nothing_of_another_history() {
    for same_fence in [false, true] {
        let sandbox = Sandbox::new();
        let mut database = Database::start(&sandbox);
        let url = database.create("torchfs");
        let dir = sandbox.folder("a");
        let first = lead(&dir, config(&url)).unwrap();
        store(&first, "k", "1");
        // Either this leader goes on after the backup, or the next one has the fence that the other history gives, too.
        let first = (!same_fence).then_some(first);
        database.stop();
        let old = database.copy_to("backup");
        database.restart();
        let engine = first.unwrap_or_else(|| lead(&dir, config(&url)).unwrap());
        let mut standby = Standby::open(sandbox.folder("b"), config(&url)).unwrap();
        for n in 0..4 {
            store(&engine, &format!("lost{n}"), "v");
        }
        eventually("the standby to have it all", || {
            standby.follow().unwrap();
            if standby.seen() == engine.durable() { Ok(()) } else { Err(format!("{}", standby.seen())) }
        });
        drop(engine);
        database.stop();
        database.put_back(&old);
        database.restart();
        // The standby looks at nothing of this.
        let other = lead(&sandbox.folder("c"), config(&url)).unwrap();
        for n in 0..8 {
            store(&other, &format!("new{n}"), "v");
        }
        drop(other);
        let error = eventually("an answer of the database", || match standby.follow() {
            Err(Error::Silent { what }) => Err(what),
            looked => Ok(looked.expect_err("another history")),
        });
        assert!(matches!(error, Error::BackInTime { .. }), "{error}");
    }
}

/// A standby behind a proxy that can lose its takeover, whose turn it is to lead. Its lease is so long that no other sign of life
/// comes while a test runs.
fn about_to_lead(sandbox: &Sandbox, database: &Database) -> (Proxy, Standby) {
    let address = "10.9.8.7:6543";
    let direct = database.create("torchfs");
    let leader = lead(&sandbox.folder("a"), config(&direct)).unwrap();
    let proxy = Proxy::start(&database.address(), address.as_bytes());
    let url = format!("postgres://postgres@{}/torchfs", proxy.address());
    let lease = Duration::from_secs(100_000);
    let behind = PostgresConfig { address: address.into(), lease, ..config(&url) };
    let mut standby = Standby::open(sandbox.folder("b"), behind).unwrap();
    store(&leader, "k", "v");
    drop(leader);
    assert_eq!(standby.follow().unwrap(), Turn::Lead);
    (proxy, standby)
}

#[test]
fn a_database_that_falls_silent_during_a_takeover_costs_a_second_look_only() {
    for loss in [Loss::Request, Loss::Answer, Loss::Next] {
        let sandbox = Sandbox::new();
        let database = Database::start(&sandbox);
        let (proxy, standby) = about_to_lead(&sandbox, &database);
        proxy.lose(loss);
        let Err(standby) = standby.lead().unwrap_or_else(|e| panic!("{loss:?}: {e}")) else {
            panic!("{loss:?}: it leads although it heard nothing")
        };
        assert_eq!(proxy.lost(), 1);
        let engine =
            standby.run(&mut |_| ControlFlow::Continue(())).unwrap().expect("nobody told it to stop");
        assert_eq!(engine.fence().0, 2, "{loss:?}: one takeover is one");
        assert_eq!(engine.get(b"k").unwrap().as_deref(), Some(&b"v"[..]));
        store(&engine, "k", "w");
    }
}

#[test]
fn a_leader_counts_its_lease_from_a_sign_of_life_that_others_saw() {
    let sandbox = Sandbox::new();
    let database = Database::start(&sandbox);
    let (proxy, standby) = about_to_lead(&sandbox, &database);
    proxy.lose(Loss::Answer);
    let Err(mut standby) = standby.lead().unwrap() else { panic!("it leads although it heard nothing") };
    eventually("the takeover to be found", || match standby.follow() {
        Ok(Turn::Lead) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    let counter = || database.sql("torchfs", "SELECT counter FROM torchfs_head").parse::<u64>().unwrap();
    let before = counter();
    let engine = standby.lead().unwrap().unwrap_or_else(|_| panic!("nobody else is there"));
    assert!(counter() > before, "it counts from a moment when nothing was sent");
    assert!(engine.leads());
}

#[test]
fn the_writable_one_of_several_hosts_is_followed_without_losing_a_commit() {
    let sandbox = Sandbox::new();
    let mut primary = Database::start(&sandbox);
    primary.create("torchfs");
    let standby = primary.make_standby("pg_standby");
    primary.wait_for_standby("pg_standby");
    // The standby first: it answers, and takes no writes yet.
    let url = format!("postgres://postgres@{},{}/torchfs", standby.address(), primary.address());
    let engine = lead(&sandbox.folder("a"), config(&url)).unwrap();
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            for n in 0..600 {
                let seq = engine.order(put(&format!("k{n:04}"), "v")).unwrap();
                if n % 5 == 0 {
                    engine.wait_durable(seq, LONG).unwrap();
                }
            }
            engine.wait_durable(engine.ordered(), LONG).unwrap();
        });
        eventually("some commits", || if engine.durable().0 > 50 { Ok(()) } else { Err("few".into()) });
        primary.kill();
        standby.promote();
        writing.join().unwrap();
    });
    let state = pairs(&engine);
    assert_eq!(state.len(), 600);
    drop(engine);
    let fresh = lead(&sandbox.folder("b"), config(&url)).unwrap();
    assert!(pairs(&fresh) == state, "the promoted server knows another state");
}

#[test]
fn a_server_that_is_refused_leaves_no_tables_behind() {
    let sandbox = Sandbox::new();
    let database = Database::start(&sandbox);
    let (one, two) = (database.create("one"), database.create("two"));
    let dir = sandbox.path("replica");
    let engine = lead(&dir, config(&one)).unwrap();
    store(&engine, "a", "1");
    engine.checkpoint().unwrap();
    drop(engine);
    let refused =
        Standby::open(&dir, config(&two)).err().expect("the folder is of another cluster").to_string();
    assert!(refused.contains("this database is empty") && refused.contains("--engine"), "{refused}");
    let made = database.sql("two", "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'torchfs%'");
    assert!(made.contains('0'), "{made}");
    drop(lead(&sandbox.path("other"), config(&two)).unwrap());
    let refused = Standby::open(&dir, config(&two)).err().expect("still of another").to_string();
    assert!(refused.contains("the database has cluster"), "{refused}");
}

#[test]
fn urls_that_cannot_work_are_refused_with_a_sentence() {
    let refused = |url: &str| torchfs_engine::postgres::check_url(url).unwrap_err().to_string();
    assert!(refused("postgres://user:secret@host/db").contains("--pg-password-file"));
    assert!(!refused("postgres://user:secret@host/db").contains("secret@"));
    assert!(refused("postgres://host:port:x/db").contains("HOST1,HOST2"));
    let sandbox = Sandbox::new();
    let database = Database::start(&sandbox);
    let missing =
        Standby::open(sandbox.folder("a"), config(&database.url("nowhere"))).err().unwrap().to_string();
    assert!(missing.contains("nowhere") && missing.contains("createdb"), "{missing}");
}

#[test]
fn connections_are_encrypted_and_certificates_and_passwords_are_checked() {
    let sandbox = Sandbox::new();
    let mut database = Database::start(&sandbox);
    database.create("torchfs");
    database.sql("torchfs", "CREATE USER torchfs PASSWORD 'secret'; GRANT ALL ON SCHEMA public TO torchfs");
    let open = |url: String| Standby::open(sandbox.folder("c"), config(&url)).err();
    let plain = open(format!("postgres://torchfs@{}/torchfs?sslmode=require", database.address()));
    assert!(
        matches!(&plain, Some(Error::Database { what }) if what.contains("sslmode=disable")),
        "{plain:?}"
    );
    database.sql("postgres", "CREATE USER stranger");
    database.sql("torchfs", "REVOKE CREATE ON SCHEMA public FROM public");
    let stranger = open(format!("postgres://stranger@{}/torchfs", database.address()));
    assert!(matches!(&stranger, Some(Error::Database { what }) if what.contains("--owner")), "{stranger:?}");
    database.stop();
    let authority = database.demand_tls_and_passwords();
    database.restart();
    let url = format!("postgres://torchfs@{}/torchfs?sslmode=require", database.address());
    let right =
        PostgresConfig { password: Some("secret".into()), ca_file: Some(authority.clone()), ..config(&url) };
    let engine = lead(&sandbox.folder("a"), right.clone()).unwrap();
    store(&engine, "k", "v");
    let encrypted =
        "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'torchfs'";
    assert_eq!(database.sql("postgres", encrypted), "t");
    drop(engine);
    let refused = |config: PostgresConfig| {
        let error = Standby::open(sandbox.folder("b"), config).err().expect("it is refused").to_string();
        assert!(!error.contains("secret") && !error.contains("wrong-password"), "{error}");
        error
    };
    let error = refused(PostgresConfig { password: Some("wrong-password".into()), ..right.clone() });
    assert!(error.contains("--pg-password-file"), "{error}");
    let error = refused(PostgresConfig { password: None, ..right.clone() });
    assert!(error.contains("--pg-password-file"), "{error}");
    let error = refused(PostgresConfig { ca_file: None, ..right.clone() });
    assert!(error.contains("certificate") && error.contains("--pg-ca-file"), "{error}");
    let error = refused(PostgresConfig { url: url.replace("require", "disable"), ..right });
    assert!(error.contains("pg_hba.conf"), "{error}");
}
