//! A metadata server that does not lead: it follows the log into its replica and takes over when its time has come.
//!
//! # Invariants
//! - The replica gets only what the log holds, of one history: whenever another leadership begins, the log must still have what was
//!   taken in before.
//! - A standby counts the leader's silence from its own last look, by its own clock, and begins anew when it could not look.
//! - Memory is bounded: what is fetched at once, and what is not yet in the replica.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use torchfs_proto::disk::Disk;
use torchfs_proto::{ClusterId, Fence, Incarnation, Seq};

use super::log::{Lease, PgLog};
use super::rows::{Group, Head, number};
use super::session::{Session, Target};
use super::{PostgresConfig, schema};
use crate::embedded::open_folder;
use crate::error::{Error, Result};
use crate::identity;
use crate::log::format::{Mark, Writer};
use crate::log_engine::{LogEngine, Parts};
use crate::overlay::Overlay;
use crate::replica::Replica;

/// How often a standby says how far it is.
const REGISTER: Duration = Duration::from_secs(1);
/// How often the building of a replica is told.
const PROGRESS: Duration = Duration::from_secs(5);

/// Who leads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Leader {
    /// Where it listens; empty when nobody leads.
    pub address: String,
    /// Its fence.
    pub fence: Fence,
    /// The last batch in the log.
    pub last: Seq,
}

/// A lead that was taken.
struct Led {
    writer: Writer,
    reign: u64,
    last: Seq,
    /// When the sign of life was sent that its lease counts from.
    sent: Instant,
}

/// What a standby does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// Look again.
    Follow,
    /// Nobody leads: [`Standby::lead`].
    Lead,
}

/// A replica that follows.
pub struct Standby {
    config: PostgresConfig,
    dir: PathBuf,
    disk: Arc<dyn Disk>,
    replica: Box<dyn Replica>,
    target: Target,
    session: Session,
    cluster: ClusterId,
    overlay: Overlay,
    /// The last batch in the replica,
    applied: Seq,
    /// and in the overlay; with the leadership under which it was read.
    seen: Seq,
    mark: Mark,
    /// The replica is not being built: what it holds is all there was at `applied`.
    whole: bool,
    /// The leadership under which the history was checked last.
    checked: Option<(Fence, u64)>,
    /// The head as last seen, and since when its counter stands there.
    head: Option<(Head, Instant)>,
    /// The number of an attempt to take over whose outcome is not known.
    attempt: Option<u64>,
    stored: Instant,
    registered: Option<Instant>,
}

impl Standby {
    /// Opens the replica in this folder against the database. Tables are made if they are missing; a replica that is missing
    /// or too old is built, which takes a while. Fails with [`Error::Silent`] while the database cannot be reached.
    pub fn open(dir: impl AsRef<Path>, config: PostgresConfig) -> Result<Standby> {
        let dir = dir.as_ref();
        let target = Target::new(&config)?;
        let mut session = Session::new(target.clone())?;
        // Whoever is refused leaves no tables behind: they would belong to a cluster that nobody has.
        let fresh = !tables_exist(&mut session)?;
        let (disk, replica) = open_folder(dir, &config.engine)?;
        if identity::Identity::load(&*disk)?.is_some() {
            return Err(Error::Database {
                what: format!(
                    "{} holds metadata of its own that no database knows; give another --dir, or move the metadata with \
                     torchfs meta dump and load",
                    dir.display()
                ),
            });
        }
        if let Some(mark) = replica.mark()?.filter(|mark| fresh && mark.applied.0 > 0) {
            return Err(Error::Database {
                what: format!(
                    "{} is the replica of cluster {:016x}, and this database is empty; give --engine that cluster's \
                     database, or an empty --dir to begin a new cluster",
                    dir.display(),
                    mark.cluster.0
                ),
            });
        }
        let cluster = open_tables(&mut session, config.engine.cluster)?;
        if let Some(floor) = config.engine.floor {
            let (fence, seq) = (floor.fence.0 as i64, floor.seq.0 as i64);
            session.execute(schema::RAISE, &[&fence, &i64::from(floor.incarnation.0), &seq])?;
        }
        let mut standby = Standby {
            dir: dir.to_owned(),
            disk,
            replica,
            target,
            session,
            cluster,
            overlay: Overlay::default(),
            applied: Seq(0),
            seen: Seq(0),
            mark: Mark { cluster, ..Mark::default() },
            whole: true,
            checked: None,
            head: None,
            attempt: None,
            stored: Instant::now(),
            registered: None,
            config,
        };
        standby.begin()?;
        Ok(standby)
    }

    /// Whose metadata it is.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Who leads, as of the last look.
    pub fn leader(&self) -> Option<Leader> {
        let (head, _) = self.head.as_ref()?;
        Some(Leader { address: head.address.clone(), fence: head.fence, last: head.last })
    }

    /// The last batch that this server has.
    pub fn seen(&self) -> Seq {
        self.seen
    }

    /// Looks once: takes in what is new, and says whether it is time to lead. Waits until the next look is due. While the
    /// database cannot be reached this is [`Error::Silent`]: try again.
    pub fn follow(&mut self) -> Result<Turn> {
        let began = Instant::now();
        let turn = self.look();
        if turn.is_err() {
            // What was not seen proves nothing.
            self.head = None;
        }
        if !matches!(turn, Ok(Turn::Lead)) {
            std::thread::sleep(self.config.poll.saturating_sub(began.elapsed()));
        }
        turn
    }

    /// Takes the lead. Still a standby if another one was faster, or the database fell silent: whether the lead was taken then
    /// shows at the next look.
    pub fn lead(mut self) -> Result<Result<LogEngine, Box<Standby>>> {
        let led = match self.take_lead() {
            Ok(led) => led,
            Err(Error::Silent { what }) => {
                tracing::warn!("the metadata's database is silent in the middle of a takeover: {what}");
                None
            }
            Err(error) => return Err(error),
        };
        let Some(Led { writer, reign, last, sent }) = led else {
            self.head = None;
            return Ok(Err(Box::new(self)));
        };
        tracing::info!(
            cluster = format_args!("{:016x}", writer.cluster.0),
            fence = writer.fence.0,
            %last,
            "this metadata server leads"
        );
        let Standby { config, disk, replica, target, session, overlay, applied, .. } = self;
        let engine_config = config.engine.clone();
        let lease = Lease::new(sent, config.lease);
        let log = PgLog::new(config, session, &target, writer, reign, lease, last)?;
        let log = Box::new(log);
        LogEngine::start(Parts { config: engine_config, disk, replica, log, writer, overlay, applied, last })
            .map(Ok)
    }

    fn take_lead(&mut self) -> Result<Option<Led>> {
        let Some((head, _)) = self.head.clone() else { return Ok(None) };
        let term = self.config.lease;
        let (reign, writer, mut sent) = if self.attempt == Some(head.reign) {
            // An earlier attempt was answered by silence and has succeeded. Others count the silence from that attempt, so
            // no lease counts from now: it takes a sign of life of its own.
            let (fence, incarnation) = (head.fence, head.incarnation);
            (head.reign, Writer { cluster: self.cluster, fence, incarnation }, None)
        } else {
            let reign = identity::draw_cluster()?.0 >> 1;
            self.attempt = Some(reign);
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64);
            let asked = Instant::now();
            let rows = self.session.query(
                schema::TAKE_OVER,
                &[
                    &(head.fence.0 as i64),
                    &(head.counter as i64),
                    &(reign as i64),
                    &self.config.address,
                    &(term.as_millis() as i64),
                    &now,
                ],
            )?;
            let Some(row) = rows.into_iter().next() else { return Ok(None) };
            let fence = Fence(number(&row, 0)?);
            let incarnation = Incarnation(u32::try_from(number(&row, 1)?).unwrap_or(u32::MAX));
            (reign, Writer { cluster: self.cluster, fence, incarnation }, Some(asked))
        };
        // Nobody else can append now: what is there is all there is.
        loop {
            let head = Head::of(&self.session.query_one(schema::HEAD, &[])?)?;
            if head.fence != writer.fence || head.reign != reign {
                return Ok(None);
            }
            self.check_head(&head)?;
            if self.seen == head.last
                && let Some(sent) = sent
            {
                return Ok(Some(Led { writer, reign, last: head.last, sent }));
            }
            if self.seen < head.last {
                self.take_groups(head.last)?;
            }
            let now = Instant::now();
            let place = head.last.0 as i64;
            if self.session.execute(schema::RENEW, &[&(writer.fence.0 as i64), &place])? == 1 {
                sent = Some(now);
            }
        }
    }

    /// Checks that the log still has what the replica holds, and builds the replica if that is not possible otherwise.
    fn begin(&mut self) -> Result<()> {
        let head = Head::of(&self.session.query_one(schema::HEAD, &[])?)?;
        let mark = self.replica.mark()?.filter(|mark| mark.applied.0 > 0);
        let Some(mark) = mark else { return self.build() };
        if mark.cluster != self.cluster {
            return Err(Error::Database {
                what: format!(
                    "{} is the replica of cluster {:016x}, and the database has cluster {:016x}; give --engine the right \
                     database, or an empty --dir, which is filled from this one",
                    self.dir.display(),
                    mark.cluster.0,
                    self.cluster.0
                ),
            });
        }
        self.check_history(&mark, &head)?;
        (self.applied, self.seen, self.mark) = (mark.applied, mark.applied, mark);
        self.checked = Some((head.fence, head.reign));
        Ok(())
    }

    /// Checks the history if it may be another one than before: the log is shorter than what was taken in, or another leadership
    /// began. A leadership never goes on from another place than it was at, so nothing else can bring other batches.
    fn check_head(&mut self, head: &Head) -> Result<()> {
        if head.last >= self.seen && self.checked == Some((head.fence, head.reign)) {
            return Ok(());
        }
        self.check_seen(head)?;
        self.checked = Some((head.fence, head.reign));
        Ok(())
    }

    /// Checks that the log has what was taken in.
    fn check_seen(&mut self, head: &Head) -> Result<()> {
        // Before the first leadership there is no history.
        if !self.whole || self.seen.0 == 0 || self.mark.reign == 0 && head.last >= self.seen {
            return Ok(());
        }
        self.check_history(&Mark { applied: self.seen, ..self.mark }, head)
    }

    fn check_history(&mut self, mark: &Mark, head: &Head) -> Result<()> {
        let reign = self.session.query(schema::REIGN, &[&(mark.fence.0 as i64)])?;
        let held = match reign.first() {
            Some(row) if number(row, 0)? == mark.reign => {
                let next: Option<i64> = row.try_get(1).map_err(super::rows::odd)?;
                next.map_or(head.last, |next| Seq((next as u64).saturating_sub(1))) >= mark.applied
            }
            _ => false,
        };
        if held && head.last >= mark.applied {
            return Ok(());
        }
        Err(Error::BackInTime {
            what: format!(
                "the database went back in time: the replica in {} holds batch {} of a log that the database does not have \
                 (its own ends at batch {}). It was restored from an older state, or it is another copy. Give --engine the \
                 current database; if going back is what you want, stop all metadata servers, remove their folders and \
                 start them again: what came later is lost, and clients have to mount again",
                self.dir.display(),
                mark.applied,
                head.last
            ),
        })
    }

    /// Builds the replica from the pairs; the log behind them follows by and by.
    fn build(&mut self) -> Result<()> {
        self.whole = false;
        self.replica.clear()?;
        self.overlay = Overlay::default();
        let settled = Seq(number(&self.session.query_one(schema::STATE, &[])?, 0)?);
        // In this order: the leadership is then none that ended before that place.
        let head = Head::of(&self.session.query_one(schema::HEAD, &[])?)?;
        (self.applied, self.seen) = (settled, settled);
        self.mark = Mark { cluster: self.cluster, applied: Seq(0), fence: head.fence, reign: head.reign };
        let about = number(&self.session.query_one(schema::PAIRS_ABOUT, &[])?, 0)?;
        let (began, mut told) = (Instant::now(), Instant::now());
        let mut done = 0u64;
        let mut after = Vec::new();
        loop {
            // The log behind `settled` is kept for us while we say that we need it.
            self.register()?;
            let rows = self.session.query(schema::PAIRS, &[&after, &(self.config.fetch_bytes as i64)])?;
            let mut pairs = Vec::with_capacity(rows.len());
            for row in &rows {
                let key: &[u8] = row.try_get(0).map_err(super::rows::odd)?;
                let value: &[u8] = row.try_get(1).map_err(super::rows::odd)?;
                pairs.push((key, value));
            }
            let Some((last, _)) = pairs.last() else { break };
            after = last.to_vec();
            done += pairs.len() as u64;
            // As of place 0: whoever finds it so builds again from the start.
            self.replica.commit(&self.mark, &mut pairs.iter().map(|(key, value)| (*key, Some(*value))))?;
            if told.elapsed() >= PROGRESS {
                told = Instant::now();
                let rate = done as f64 / began.elapsed().as_secs_f64();
                let left_s = (about.saturating_sub(done) as f64 / rate.max(1.0)).round() as u64;
                tracing::info!(done, about, per_s = rate as u64, left_s, "building the replica");
            }
        }
        self.mark.applied = settled;
        self.replica.commit(&self.mark, &mut std::iter::empty())?;
        self.whole = true;
        if done > 0 {
            let took_s = began.elapsed().as_secs();
            tracing::info!(pairs = done, %settled, took_s, "the replica is built");
        }
        Ok(())
    }

    fn look(&mut self) -> Result<Turn> {
        let asked = Instant::now();
        let head = Head::of(&self.session.query_one(schema::HEAD, &[])?)?;
        self.check_head(&head)?;
        if !self.whole {
            // The database fell silent before the end.
            self.build()?;
        }
        while self.seen < head.last {
            self.take_groups(head.last)?;
        }
        self.store(false)?;
        if self.registered.is_none_or(|at| at.elapsed() >= REGISTER) {
            self.register()?;
        }
        let since = match &self.head {
            Some((known, since)) if known.counter == head.counter && known.fence == head.fence => *since,
            _ => asked,
        };
        let term = self.config.lease.max(Duration::from_millis(head.lease_ms)) + self.config.margin;
        let free = head.address.is_empty() || self.attempt == Some(head.reign);
        self.head = Some((head, since));
        // Counted to the question, not to the answer: the counter stood still at least until then.
        let silent = asked.saturating_duration_since(since);
        Ok(if free || silent > term { Turn::Lead } else { Turn::Follow })
    }

    /// Takes in the next groups of the log.
    fn take_groups(&mut self, last: Seq) -> Result<()> {
        let bytes = self.config.fetch_bytes as i64;
        let rows = self.session.query(schema::GROUPS, &[&(self.seen.0 as i64), &bytes])?;
        let mut gap = rows.is_empty();
        for row in &rows {
            let group = Group::of(row)?;
            if group.first.0 > self.seen.0 + 1 {
                gap = true;
                break;
            }
            if group.fence != self.mark.fence || self.mark.reign == 0 {
                // Asked for again: the groups may be of a later history than the head that led here.
                let head = Head::of(&self.session.query_one(schema::HEAD, &[])?)?;
                self.check_seen(&head)?;
                let reign = self.session.query_one(schema::REIGN, &[&(group.fence.0 as i64)])?;
                (self.mark.fence, self.mark.reign) = (group.fence, number(&reign, 0)?);
            }
            let overlay = &mut self.overlay;
            group.replay(self.cluster, self.seen, &mut |_, changes| overlay.apply(changes))?;
            self.seen = group.last;
        }
        if gap && self.seen < last {
            tracing::warn!(
                seen = %self.seen,
                %last,
                "the log does not reach back to this replica any more; it is built anew"
            );
            return self.build();
        }
        self.store(false)
    }

    /// Brings what was followed into the replica when there is enough of it.
    fn store(&mut self, now: bool) -> Result<()> {
        let (keys, bytes) = self.overlay.waiting();
        let config = &self.config.engine;
        let due = bytes >= config.checkpoint_bytes / 4
            || keys >= config.checkpoint_keys / 4
            || self.stored.elapsed() >= config.checkpoint_interval;
        if self.seen == self.applied || !(due || now) {
            return Ok(());
        }
        let layer = self.overlay.freeze();
        self.mark.applied = self.seen;
        let mut changes = layer.iter().map(|(key, value)| (&**key, value.as_deref()));
        let stored = self.replica.commit(&self.mark, &mut changes);
        if let Err(error) = stored {
            self.overlay.thaw();
            return Err(error);
        }
        self.overlay.forget_lower();
        self.applied = self.seen;
        self.stored = Instant::now();
        Ok(())
    }

    fn register(&mut self) -> Result<()> {
        if self.registered.is_some_and(|at| at.elapsed() < REGISTER) {
            return Ok(());
        }
        let bytes = self.replica.room()?.bytes as i64;
        self.session.execute(schema::REGISTER, &[&self.config.address, &(self.seen.0 as i64), &bytes])?;
        self.registered = Some(Instant::now());
        Ok(())
    }

    /// Follows until it is time and leads, unless told to stop.
    pub fn run(mut self, until: &mut dyn FnMut(&Standby) -> ControlFlow<()>) -> Result<Option<LogEngine>> {
        let mut silent = false;
        loop {
            if until(&self).is_break() {
                return Ok(None);
            }
            match self.follow() {
                Ok(Turn::Follow) => {
                    if std::mem::take(&mut silent) {
                        tracing::info!("the metadata's database answers again");
                    }
                }
                Ok(Turn::Lead) => match self.lead()? {
                    Ok(engine) => return Ok(Some(engine)),
                    Err(standby) => self = *standby,
                },
                Err(Error::Silent { what }) => {
                    if !std::mem::replace(&mut silent, true) {
                        tracing::warn!("the metadata's database is silent: {what}");
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Makes the tables if they are missing, and says whose metadata they are.
fn open_tables(session: &mut Session, wanted: Option<ClusterId>) -> Result<ClusterId> {
    if !tables_exist(session)? {
        let cluster = wanted.map_or_else(identity::draw_cluster, Ok)?;
        tracing::info!("making the metadata's tables");
        session.batch(&schema::CREATE.replace("CLUSTER", &(cluster.0 as i64).to_string()))?;
    }
    let row = session.query_one(schema::FORMAT, &[])?;
    let version: i32 = row.try_get(0).map_err(super::rows::odd)?;
    let must_know: i64 = row.try_get(1).map_err(super::rows::odd)?;
    if version > schema::VERSION {
        return Err(Error::Unsupported { what: format!("the database has tables of version {version}") });
    }
    if must_know & !schema::MUST_KNOWN != 0 {
        return Err(Error::Unsupported {
            what: format!("the database needs unknown features {must_know:#x}"),
        });
    }
    let cluster = ClusterId(number(&row, 2)?);
    match wanted {
        Some(expected) if expected != cluster => Err(Error::Database {
            what: format!(
                "it has the metadata of cluster {:016x}, not of {:016x}; give --engine an empty database, made with: createdb NAME",
                cluster.0, expected.0
            ),
        }),
        _ => Ok(cluster),
    }
}

fn tables_exist(session: &mut Session) -> Result<bool> {
    session.query_one(schema::EXISTS, &[])?.try_get(0).map_err(super::rows::odd)
}
