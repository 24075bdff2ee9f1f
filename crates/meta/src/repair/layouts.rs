//! Layouts that nothing uses: found by a walk over what could name them, left out of what has to be repaired or moved, and
//! dropped from the table a little later.
//!
//! A layout is used while a volume's policy leads to it, an inode, a block or a dead block names it, or a layout that is
//! used was replaced by it. Policies are in memory; the rest is walked, and only when something happened after which a
//! layout may be unused: a volume was changed or removed, a layout was replaced, or a server that goes is in groups that
//! have no other server to go to. The walk ends as soon as every layout in question was seen in use, which is soon for most.
//!
//! # Invariants
//! - Whatever a batch names from the beginning of a walk until the layout is dropped makes it used again.
//! - A session that was there before a layout fell idle may still commit blocks under it; the layout stays in the table until
//!   such sessions are gone, or have had `layout_keep_ms`. What a removed volume had, no session can commit.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use torchfs_engine::{Batch, Change};
use torchfs_proto::key::{self, Parts, Space};
use torchfs_proto::layout::ServerState;
use torchfs_proto::record::{Block, DeadBlock, Inode, Server};
use torchfs_proto::{LayoutId, Result, SessionId, VolumeId};

use crate::service::{Meta, State};
use crate::table::Table;

/// Records that one step reads at most.
const SCAN_MAX: usize = 8_192;
/// The first pause between two walks for the same drain; it doubles up to the longest one.
const PAUSE: Duration = Duration::from_secs(30);
const PAUSE_MAX: Duration = Duration::from_secs(3_600);

/// What is known of layouts that nothing uses.
#[derive(Default)]
pub(crate) struct Layouts {
    due: bool,
    walk: Option<Walk>,
    /// When a drain may have them looked for again, and after what pause.
    again: Option<(Instant, Duration)>,
    idle: BTreeMap<LayoutId, Idle>,
    /// Named by blocks of volumes that are removed.
    of_removed: BTreeSet<LayoutId>,
}

/// A walk under way.
struct Walk {
    /// Layouts that were not seen in use yet.
    wanted: BTreeSet<LayoutId>,
    /// What is still to be walked, last first.
    spaces: Vec<(VolumeId, Space)>,
    at: Option<Vec<u8>>,
    began: Instant,
    sessions: BTreeSet<SessionId>,
}

/// A layout that nothing uses.
struct Idle {
    since: Instant,
    /// The sessions of that time.
    sessions: BTreeSet<SessionId>,
}

impl Layouts {
    /// Something happened after which a layout may be unused.
    pub fn look(&mut self) {
        (self.due, self.again) = (true, None);
    }

    /// Whether it is not known yet which layouts are unused.
    pub fn is_looking(&self) -> bool {
        self.due || self.walk.is_some()
    }

    /// Blocks of a removed volume name this layout.
    pub fn left_by_removed(&mut self, layout: LayoutId) {
        self.of_removed.insert(layout);
    }

    /// Layouts that nothing uses.
    pub fn idle(&self) -> BTreeSet<LayoutId> {
        self.idle.keys().copied().collect()
    }

    /// A batch is ordered: what it names is in use.
    pub fn touch(&mut self, batch: &Batch, table: &Table) {
        if self.idle.is_empty() && self.walk.is_none() {
            return;
        }
        let mut named = BTreeSet::new();
        for change in &batch.changes {
            let Change::Put(at, value) = change else { continue };
            let Some(parts) = Parts::of(at) else { continue };
            named.extend(Space::of(parts.space).and_then(|space| layout_in(space, value)));
        }
        let is_idle = |id: &LayoutId| self.idle.contains_key(id);
        let is_wanted = |id: &LayoutId| self.walk.as_ref().is_some_and(|walk| walk.wanted.contains(id));
        if named.iter().any(|id| is_idle(id) || is_wanted(id)) {
            self.used(&named, table);
        }
    }

    fn used(&mut self, named: &BTreeSet<LayoutId>, table: &Table) {
        if let Some(walk) = &mut self.walk {
            walk.wanted.retain(|id| !named.contains(id));
        }
        let rest = self.idle.keys().filter(|id| !named.contains(id)).copied().collect();
        let rest = unneeded(table, rest);
        self.idle.retain(|id, _| rest.contains(id));
        self.of_removed.retain(|id| !named.contains(id));
    }
}

impl Meta {
    /// A part of a walk, and the end of layouts whose time has come. Answers whether there was something to do.
    pub(super) fn layouts_step(&self) -> bool {
        let now = self.clock.now();
        let part = {
            let mut state = self.state.lock();
            self.drop_idle(&mut state, now);
            if state.repairs.layouts.walk.is_none() && !self.begin_walk(&mut state, now) {
                return false;
            }
            let walk = state.repairs.layouts.walk.as_ref();
            walk.map(|walk| (walk.spaces.last().copied(), walk.at.clone(), walk.wanted.clone()))
        };
        let Some((next, from, wanted)) = part else { return false };
        let walked = match next {
            Some((volume, space)) => self.walk_part(volume, space, from, &wanted),
            None => Ok((BTreeSet::new(), None)),
        };
        let mut state = self.state.lock();
        let state = &mut *state;
        let layouts = &mut state.repairs.layouts;
        let (used, at) = match walked {
            Ok(walked) => walked,
            Err(fault) => {
                tracing::warn!("whether layouts are in use cannot be read: {fault}");
                layouts.walk = None;
                layouts.again = Some((now + PAUSE, PAUSE));
                return false;
            }
        };
        let Some(walk) = &mut layouts.walk else { return true };
        walk.wanted.retain(|id| !used.contains(id));
        if at.is_none() {
            walk.spaces.pop();
        }
        walk.at = at;
        if !walk.wanted.is_empty() && !walk.spaces.is_empty() {
            return true;
        }
        let Some(walk) = layouts.walk.take() else { return true };
        let known = layouts.idle.keys().copied();
        let rest = unneeded(&state.members.table, walk.wanted.iter().copied().chain(known).collect());
        for id in walk.wanted.into_iter().filter(|id| rest.contains(id)) {
            let idle = Idle { since: walk.began, sessions: walk.sessions.clone() };
            layouts.idle.entry(id).or_insert(idle);
        }
        if !state.volumes.values().any(|volume| volume.removed) {
            let idle = &layouts.idle;
            layouts.of_removed.retain(|id| idle.contains_key(id)); // others use the rest
        }
        true
    }

    /// Begins a walk if there is a reason for one and a layout that may be unused.
    fn begin_walk(&self, state: &mut State, now: Instant) -> bool {
        let asked = std::mem::take(&mut state.repairs.layouts.due);
        let pause = match state.repairs.layouts.again {
            _ if asked => PAUSE,
            Some((at, _)) if now < at => return false,
            Some((_, pause)) => (pause * 2).min(PAUSE_MAX),
            None => PAUSE,
        };
        if !asked && !self.drains_are_stuck(state) {
            return false;
        }
        state.repairs.layouts.again = Some((now + pause, pause));
        let named = self.named_by_policies(state);
        let table = &state.members.table;
        let free = table.layouts.keys().filter(|id| !named.contains(id)).copied().collect();
        let idle = &state.repairs.layouts.idle;
        let wanted: BTreeSet<LayoutId> =
            unneeded(table, free).into_iter().filter(|id| !idle.contains_key(id)).collect();
        if wanted.is_empty() {
            return false;
        }
        let mut spaces = Vec::new();
        for volume in state.volumes.values() {
            // Blocks first: where a layout is in use, one of them names it. Inodes of a removed volume go unread.
            let inodes = (!volume.removed).then_some(Space::Inode);
            let all = inodes.into_iter().chain([Space::DeadBlock, Space::Block]);
            spaces.extend(all.map(|space| (volume.id, space)));
        }
        spaces.sort_by_key(|(_, space)| *space != Space::Inode);
        let sessions = state.sessions.keys().copied().collect();
        state.repairs.layouts.walk = Some(Walk { wanted, spaces, at: None, began: now, sessions });
        true
    }

    /// Reads the next records, without the lock: which of the layouts they name, and where to go on.
    fn walk_part(
        &self,
        volume: VolumeId,
        space: Space,
        from: Option<Vec<u8>>,
        wanted: &BTreeSet<LayoutId>,
    ) -> Result<(BTreeSet<LayoutId>, Option<Vec<u8>>)> {
        let all = key::space(volume, space);
        let (mut used, mut next, mut seen) = (BTreeSet::new(), None, 0);
        let from = from.unwrap_or_else(|| all.clone());
        self.engine.scan(&from, &key::after(&all), false, &mut |at, value| {
            if seen >= SCAN_MAX {
                next = Some(at.to_vec());
                return ControlFlow::Break(());
            }
            seen += 1;
            used.extend(layout_in(space, value).filter(|id| wanted.contains(id)));
            if used.len() == wanted.len() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok((used, next))
    }

    /// Drops the layouts that nothing uses and no session can commit to any more.
    fn drop_idle(&self, state: &mut State, now: Instant) {
        if state.repairs.layouts.idle.is_empty() {
            return;
        }
        let named = self.named_by_policies(state);
        state.repairs.layouts.used(&named, &state.members.table);
        let keep = Duration::from_millis(u64::from(self.config.layout_keep_ms));
        let layouts = &state.repairs.layouts;
        let over = |(id, idle): &(&LayoutId, &Idle)| {
            layouts.of_removed.contains(id)
                || now >= idle.since + keep
                || !idle.sessions.iter().any(|session| state.sessions.contains_key(session))
        };
        let over: BTreeSet<LayoutId> = layouts.idle.iter().filter(over).map(|(id, _)| *id).collect();
        if let Err(fault) = self.drop_layouts(state, over, now) {
            tracing::warn!("layouts that nothing uses cannot be dropped: {fault}");
        }
    }

    /// Drops these layouts, as far as no other one leads to them.
    pub(crate) fn drop_layouts(
        &self,
        state: &mut State,
        layouts: BTreeSet<LayoutId>,
        now: Instant,
    ) -> Result<()> {
        let layouts = unneeded(&state.members.table, layouts);
        if layouts.is_empty() {
            return Ok(());
        }
        self.edit_members(state, now, |table, _| {
            table.drop_layouts(&layouts);
            Ok(())
        })?;
        let repairs = &mut state.repairs;
        repairs.waits.retain(|(id, _), _| !layouts.contains(id));
        repairs.lost.retain(|_, (id, _)| !layouts.contains(id));
        repairs.layouts.idle.retain(|id, _| !layouts.contains(id));
        repairs.layouts.of_removed.retain(|id| !layouts.contains(id));
        for id in &layouts {
            tracing::info!(layout = id.0, "a layout that nothing uses is dropped");
        }
        Ok(())
    }

    fn named_by_policies(&self, state: &State) -> BTreeSet<LayoutId> {
        let table = &state.members.table;
        let named = self.policies(state).into_iter();
        named.filter_map(|(asked, stripe)| table.layout_for(asked, stripe)).map(|layout| layout.id).collect()
    }

    fn drains_are_stuck(&self, state: &State) -> bool {
        let (table, idle) = (&state.members.table, state.repairs.layouts.idle());
        let leaving = |server: &&Server| server.draining || server.state == ServerState::Out;
        let leaving = table.servers.values().filter(leaving);
        leaving.into_iter().any(|server| table.stuck(server.id, &idle) > 0)
    }
}

/// Those of these layouts that no other one was replaced by.
fn unneeded(table: &Table, mut layouts: BTreeSet<LayoutId>) -> BTreeSet<LayoutId> {
    // Each is replaced by a later one, so one walk in their order is enough.
    for layout in table.layouts.values().filter(|layout| layout.replaced_by.is_some()) {
        if !layouts.contains(&layout.id)
            && let Some(next) = layout.replaced_by
        {
            layouts.remove(&next);
        }
    }
    layouts
}

/// The layout that a record names.
fn layout_in(space: Space, value: &[u8]) -> Option<LayoutId> {
    match space {
        Space::Inode => minicbor::decode::<Inode>(value).ok()?.layout,
        Space::Block => Some(minicbor::decode::<Block>(value).ok()?.layout),
        Space::DeadBlock => Some(minicbor::decode::<DeadBlock>(value).ok()?.layout),
        _ => None,
    }
}
