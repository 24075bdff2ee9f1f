//! Volumes: made, listed, changed for new data, and removed with everything in them.
//!
//! A volume that is removed serves nobody from the batch that says so. Its records then go in pieces, its blocks into the
//! queue of the dead; when the deleter is done with them, the last records go. A restart finds it and goes on.

use std::ops::ControlFlow;
use std::time::Instant;

use torchfs_proto::attr::{Time, VolumeInfo};
use torchfs_proto::chunk::MAX_BLOCK;
use torchfs_proto::key::Space;
use torchfs_proto::layout::Scheme;
use torchfs_proto::msg::meta::{Done, Policy, VolumeOp, VolumePolicy, VolumeReport};
use torchfs_proto::record::{self, Block, Counters, DeadBlock};
use torchfs_proto::{Code, Fault, Ino, LayoutId, Result, VolumeId, key};

use super::open::root;
use super::{Chore, Meta, State};

/// Most volumes.
const VOLUMES_MAX: usize = 1_024;
/// Longest name.
const NAME_MAX: usize = 64;
/// Most placement groups of a layout: its record must fit a value.
pub(super) const STRIPE_MAX: u32 = 512;
/// Smallest block size.
const BLOCK_MIN: u32 = 256 << 10;
/// Records that one batch removes.
const EMPTY_MAX: usize = 512;

impl Meta {
    /// Serves an operation on volumes.
    pub(super) fn volume_op(&self, state: &mut State, op: &VolumeOp, now: Instant) -> Result<Done> {
        let volume = match op {
            VolumeOp::List => {
                let volumes: Vec<VolumeId> = state.volumes.keys().copied().collect();
                let reports = volumes.into_iter().map(|volume| self.volume_report(state, volume));
                return Ok(Done::Volumes(reports.collect::<Result<_>>()?));
            }
            VolumeOp::Create { name, policy } => self.create_volume(state, name, policy, now)?,
            VolumeOp::Set { name, policy } => self.set_volume(state, name, policy, now)?,
            VolumeOp::Remove { name, force } => self.remove_volume(state, name, *force, now)?,
        };
        Ok(Done::Volumes(vec![self.volume_report(state, volume)?]))
    }

    fn create_volume(
        &self,
        state: &mut State,
        name: &str,
        policy: &VolumePolicy,
        now: Instant,
    ) -> Result<VolumeId> {
        check(policy)?;
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(fits) {
            return Err(Fault::new(Code::Invalid, format!("`{name}` cannot be the name of a volume"))
                .next("use 1 to 64 letters, digits, `-`, `_` and `.`"));
        }
        if state.volumes.values().any(|volume| volume.name == name) {
            return Err(Fault::new(Code::Exists, format!("there is a volume {name}"))
                .next("choose another name, or change it with `torchfs volume set`"));
        }
        if state.volumes.len() >= VOLUMES_MAX {
            return Err(Fault::new(Code::TooMany, format!("there are {VOLUMES_MAX} volumes")));
        }
        let last = state.volumes.keys().next_back().map_or(0, |id| id.0);
        let id = VolumeId(state.cluster.next_volume.max(last + 1));
        let mut view = self.view(id);
        let volume = record::Volume {
            born: view.born,
            id,
            name: name.to_string(),
            block_size: policy.block_size.unwrap_or(self.config.block_size),
            compression: policy.compression.unwrap_or(self.config.compression),
            scheme: policy.scheme,
            stripe: policy.stripe,
            removed: false,
        };
        let root = root(view.born, Time::from_ns(self.clock.wall_ns()));
        view.put(key::inode(id, Ino::ROOT), &root);
        let counters = Counters { next_ino: Ino::ROOT.0 + 1, inodes: 1, ..Counters::default() };
        view.put(key::counters(id), &counters);
        self.put_volume(state, view, volume, now)?;
        Ok(id)
    }

    fn set_volume(
        &self,
        state: &mut State,
        name: &str,
        policy: &VolumePolicy,
        now: Instant,
    ) -> Result<VolumeId> {
        check(policy)?;
        let before = named(state, name)?.clone();
        let volume = record::Volume {
            block_size: policy.block_size.unwrap_or(before.block_size),
            compression: policy.compression.unwrap_or(before.compression),
            scheme: policy.scheme.or(before.scheme),
            stripe: policy.stripe.or(before.stripe),
            ..before
        };
        let id = volume.id;
        self.put_volume(state, self.view(id), volume, now)?;
        Ok(id)
    }

    fn remove_volume(&self, state: &mut State, name: &str, force: bool, now: Instant) -> Result<VolumeId> {
        let volume = named(state, name)?.clone();
        let id = volume.id;
        if volume.name == self.config.volume {
            return Err(Fault::new(Code::Busy, format!("{name} is the default volume and stays")));
        }
        let sessions = state.sessions.values().filter(|session| session.volume == id).count();
        if sessions > 0 {
            return Err(Fault::new(Code::Busy, format!("{sessions} sessions use volume {name}"))
                .next("unmount it everywhere; `torchfs sessions` shows where"));
        }
        let inodes = self.view(id).counters()?.inodes;
        if inodes > 1 && !force {
            return Err(Fault::new(
                Code::NotEmpty,
                format!("volume {name} has {} files and folders", inodes - 1),
            )
            .next("give --force to remove it with everything in it"));
        }
        self.put_volume(state, self.view(id), record::Volume { removed: true, ..volume }, now)?;
        state.chores.push_back(Chore::Empty(id));
        tracing::warn!(volume = name, "a volume is being removed");
        Ok(id)
    }

    /// Writes a volume's record, with the layout that it needs, in one batch.
    fn put_volume(
        &self,
        state: &mut State,
        mut view: crate::view::View<'_>,
        volume: record::Volume,
        now: Instant,
    ) -> Result<()> {
        let mut table = state.members.table.clone();
        let mut counters = state.cluster.clone();
        counters.next_volume = counters.next_volume.max(volume.id.0 + 1);
        if !volume.removed {
            let (asked, stripe) = self.policy_of(&volume);
            table.ensure_layout(&mut counters, asked, stripe);
        }
        table.write(&state.members.table, &mut view, &mut counters, &state.cluster);
        view.put(key::volume(volume.id), &volume);
        let seq = self.order(state, view, now)?;
        state.members.take(table, seq);
        state.members.placed = seq; // the volume's policies are told with the placement
        state.cluster = counters;
        if !volume.removed {
            state.repairs.layouts.look(); // the policy before may have been the last of its kind
        }
        state.volumes.insert(volume.id, volume);
        Ok(())
    }

    /// What a volume asks of its layout.
    pub(super) fn policy_of(&self, volume: &record::Volume) -> (Option<Scheme>, u32) {
        (volume.scheme.or(self.config.redundancy), volume.stripe.unwrap_or(self.config.groups))
    }

    /// What all volumes ask of their layouts.
    pub(crate) fn policies(&self, state: &State) -> Vec<(Option<Scheme>, u32)> {
        state.volumes.values().filter(|volume| !volume.removed).map(|volume| self.policy_of(volume)).collect()
    }

    /// The layout for new blocks of a volume; 0 before enough servers have joined.
    pub(super) fn volume_layout(&self, state: &State, volume: &record::Volume) -> (LayoutId, Scheme) {
        let (asked, stripe) = self.policy_of(volume);
        let layout = state.members.table.layout_for(asked, stripe);
        layout
            .map_or((LayoutId(0), asked.unwrap_or(Scheme::Replicas(1))), |layout| (layout.id, layout.scheme))
    }

    /// A volume as a mount sees it.
    pub(super) fn volume_info(&self, state: &State, volume: &record::Volume) -> VolumeInfo {
        VolumeInfo {
            id: volume.id,
            name: volume.name.clone(),
            block_size: volume.block_size,
            compression: volume.compression,
            layout: self.volume_layout(state, volume).0,
        }
    }

    /// The layout that a policy of a file or folder asks for, on a copy of the table: `None` as the volume says.
    pub(super) fn policy_layout(
        &self,
        state: &State,
        volume: VolumeId,
        policy: &Policy,
        table: &mut crate::table::Table,
        counters: &mut record::ClusterCounters,
    ) -> Result<Option<LayoutId>> {
        check(&VolumePolicy { scheme: policy.scheme, stripe: policy.stripe, ..VolumePolicy::default() })?;
        if *policy == Policy::default() {
            return Ok(None);
        }
        let volume = state.volumes.get(&volume).ok_or(Code::NoSession)?;
        let (asked, stripe) = self.policy_of(volume);
        let (asked, stripe) = (policy.scheme.or(asked), policy.stripe.unwrap_or(stripe));
        match table.ensure_layout(counters, asked, stripe) {
            Some(layout) => Ok(Some(layout)),
            None => {
                let needs = asked.unwrap_or(Scheme::Replicas(1));
                let what = format!("{needs} needs {} data servers that are up", needs.width());
                // Not a fault that passes by itself: whoever asks is told at once.
                Err(Fault::new(Code::Invalid, what).next("start data servers with `torchfs data`"))
            }
        }
    }

    fn volume_report(&self, state: &State, id: VolumeId) -> Result<VolumeReport> {
        let Some(volume) = state.volumes.get(&id) else { return Err(Code::NotFound.into()) };
        let counters = self.view(id).counters()?;
        Ok(VolumeReport {
            info: self.volume_info(state, volume),
            scheme: self.volume_layout(state, volume).1,
            asked: volume.scheme,
            stripe: self.policy_of(volume).1,
            inodes: counters.inodes,
            blocks: counters.blocks,
            bytes: counters.bytes,
            stored: counters.stored,
            sessions: state.sessions.values().filter(|session| session.volume == id).count() as u64,
            removed: volume.removed,
        })
    }

    /// A piece of a volume's removal; answers whether there is more to do now.
    pub(crate) fn empty_volume(&self, state: &mut State, id: VolumeId) -> Result<bool> {
        let now = self.clock.now();
        let mut view = self.view(id);
        view.frees = true;
        let mut found: Vec<Vec<u8>> = Vec::new();
        let mut blocks: Vec<(Vec<u8>, Block)> = Vec::new();
        let space = key::space(id, Space::Block);
        view.scan(&space, &key::after(&space), false, &mut |at, block: Block| {
            blocks.push((at.to_vec(), block));
            if blocks.len() >= EMPTY_MAX { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        let dead = blocks.len() as u64;
        let bytes: u64 = blocks.iter().map(|(_, block)| u64::from(block.len)).sum();
        let stored: u64 = blocks.iter().map(|(_, block)| block.stored).sum();
        for (at, block) in blocks {
            state.repairs.layouts.left_by_removed(block.layout);
            if let Some(block_id) = key::Parts::of(&at).and_then(|parts| parts.block_at(0)) {
                let gone =
                    DeadBlock { born: view.born, layout: block.layout, substitutes: block.substitutes };
                view.put(key::dead_block(id, view.due_ms, block_id), &gone);
            }
            view.delete(at);
        }
        if dead > 0 {
            view.count(|counters| {
                counters.dead += dead;
                counters.blocks = counters.blocks.saturating_sub(dead);
                counters.bytes = counters.bytes.saturating_sub(bytes);
                counters.stored = counters.stored.saturating_sub(stored);
            })?;
            self.order(state, view, now)?;
            return Ok(true);
        }
        // Everything else but counters and what waits to be deleted. That may be much, and is not passed through here.
        let [counters, dead_block, dead_range] =
            [Space::Counters, Space::DeadBlock, Space::DeadRange].map(|space| key::space(id, space));
        let all = id.0.to_be_bytes().to_vec();
        let mut spaces: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        let mut from = all.clone();
        for kept in [&counters, &dead_block, &dead_range] {
            spaces.push((std::mem::replace(&mut from, key::after(kept)), kept.clone()));
        }
        spaces.push((from, key::after(&all)));
        for (from, to) in spaces.iter().filter(|(from, to)| from < to) {
            if found.len() >= EMPTY_MAX {
                break;
            }
            self.engine.scan(from, to, false, &mut |at, _| {
                found.push(at.to_vec());
                if found.len() >= EMPTY_MAX { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
        }
        let more = !found.is_empty();
        found.into_iter().for_each(|at| view.delete(at));
        if more {
            self.order(state, view, now)?;
            return Ok(true);
        }
        let mut waiting = false;
        for space in [dead_block, dead_range] {
            self.engine.scan(&space, &key::after(&space), false, &mut |_, _| {
                waiting = true;
                ControlFlow::Break(())
            })?;
        }
        if waiting {
            return Ok(false); // the deleter is not done; looked at again a little later
        }
        view.delete(key::counters(id));
        view.delete(key::volume(id));
        self.order(state, view, now)?;
        if let Some(volume) = state.volumes.remove(&id) {
            let (asked, stripe) = self.policy_of(&volume);
            let own = state.members.table.layout_for(asked, stripe).map(|layout| layout.id);
            own.into_iter().for_each(|layout| state.repairs.layouts.left_by_removed(layout));
        }
        state.repairs.layouts.look();
        tracing::info!(volume = id.0, "a removed volume is gone");
        Ok(false)
    }
}

/// Whether policies are within their bounds.
fn check(policy: &VolumePolicy) -> Result<()> {
    if let Some(size) = policy.block_size
        && (!size.is_power_of_two() || !(BLOCK_MIN..=MAX_BLOCK).contains(&size))
    {
        return Err(Fault::new(Code::Invalid, format!("{size} bytes cannot be the size of blocks"))
            .next("use a power of two from 256 KiB to 16 MiB"));
    }
    if let Some(scheme) = policy.scheme.filter(|scheme| !scheme.is_sound()) {
        return Err(Fault::new(Code::Invalid, format!("{scheme} is no redundancy"))
            .next("use replicas:1 to replicas:8, or ec:K+M with K up to 16 and M up to 8"));
    }
    if let Some(stripe) = policy.stripe.filter(|stripe| !(1..=STRIPE_MAX).contains(stripe)) {
        return Err(Fault::new(Code::Invalid, format!("a stripe of {stripe} groups is not possible"))
            .next(format!("use 1 to {STRIPE_MAX}")));
    }
    Ok(())
}

fn named<'a>(state: &'a State, name: &str) -> Result<&'a record::Volume> {
    let found = state.volumes.values().find(|volume| volume.name == name && !volume.removed);
    found.ok_or_else(|| {
        Fault::new(Code::NotFound, format!("there is no volume {name}"))
            .next("`torchfs volume ls` lists them")
    })
}
