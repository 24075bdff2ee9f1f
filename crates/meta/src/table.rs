//! The table: data servers and layouts as records have them, and the edits that are made to it. Pure.
//!
//! Whoever changes the table edits a copy; what differs is written in one batch, and when that is ordered the copy takes
//! the place of the original. So memory and records agree, whatever fails in between.
//!
//! # Invariants
//! - The version rises with every change that clients should know.
//! - A group's target changes only together with its dirty mark, so repair looks at it, also after a restart.
//! - What may hold a piece of a block is in the table until repair saw the piece at its target: `servers`, `moving_to`,
//!   `former`, or a substitute in the block's record.

use std::collections::{BTreeMap, BTreeSet};

use torchfs_proto::extent::NewBlock;
use torchfs_proto::layout::{Group, Layout, Scheme, ServerState};
use torchfs_proto::record::{self, ClusterCounters, LayoutRecord};
use torchfs_proto::{BlockId, Code, Fault, LayoutId, Result, ServerId, key};

use crate::placement::{self, Candidate};
use crate::view::View;

/// A group by layout and place in it.
pub type GroupAt = (LayoutId, u32);

/// Former places of one piece that a group learns of by finding pieces there. There are more only if many servers were to be
/// searched for stale pieces when the metadata was lost.
const FOUND_MAX: usize = 8;

/// Pieces that are elsewhere than at their group's target.
pub type Substitutes = Vec<(u8, ServerId)>;

/// What clients see of a server: number, address, zone, whether it is up, whether it drains.
type ShownServer<'a> = (ServerId, &'a str, &'a str, bool, bool);

/// How often a group was marked dirty, and how often because pieces may be gone from where they were seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Dirt {
    marks: u64,
    losses: u64,
}

/// Servers and layouts.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Table {
    /// All servers.
    pub servers: BTreeMap<ServerId, record::Server>,
    /// All layouts.
    pub layouts: BTreeMap<LayoutId, Layout>,
    /// Rises with every change that clients should know.
    pub version: u64,
    /// How often each group was marked dirty since the start; a pass that ends compares.
    dirt: BTreeMap<GroupAt, Dirt>,
    /// The same for servers that may hold stale pieces.
    pub marks: BTreeMap<ServerId, u64>,
}

impl Table {
    /// Takes in what the store has.
    pub fn load(view: &View<'_>, counters: &ClusterCounters) -> Result<Table> {
        let mut table = Table { version: counters.placement, ..Table::default() };
        let all = key::space(key::CLUSTER, key::Space::Server);
        for (_, record) in view.list::<record::Server>(&all, usize::MAX)? {
            table.servers.insert(record.id, record);
        }
        let all = key::space(key::CLUSTER, key::Space::Layout);
        for (_, record) in view.list::<LayoutRecord>(&all, usize::MAX)? {
            table.layouts.insert(record.layout.id, record.layout);
        }
        Ok(table)
    }

    /// Writes what differs from `before`, with the version and the counters if they changed.
    pub fn write(
        &mut self,
        before: &Table,
        view: &mut View<'_>,
        counters: &mut ClusterCounters,
        was: &ClusterCounters,
    ) {
        for (id, server) in &self.servers {
            if before.servers.get(id) != Some(server) {
                view.put(key::server(*id), server);
            }
        }
        for id in before.servers.keys().filter(|id| !self.servers.contains_key(id)) {
            view.delete(key::server(*id));
        }
        for (id, layout) in &self.layouts {
            if before.layouts.get(id) != Some(layout) {
                view.put(key::layout(*id), &LayoutRecord { born: view.born, layout: layout.clone() });
            }
        }
        for id in before.layouts.keys().filter(|id| !self.layouts.contains_key(id)) {
            view.delete(key::layout(*id));
        }
        if self.shown() != before.shown() {
            self.version = before.version + 1;
            counters.placement = self.version;
        }
        if counters != was {
            view.put(key::cluster_counters(), &*counters);
        }
    }

    /// What clients see of it.
    fn shown(&self) -> (Vec<ShownServer<'_>>, Vec<Layout>) {
        let server = |s: &record::Server| s.state < ServerState::Down;
        let servers =
            self.servers.values().map(|s| (s.id, s.addr.as_str(), s.zone.as_str(), server(s), s.draining));
        let clean = |layout: &Layout| {
            let groups = layout.groups.iter().map(|group| Group { dirty: false, ..group.clone() });
            Layout { groups: groups.collect(), ..layout.clone() }
        };
        (servers.collect(), self.layouts.values().map(clean).collect())
    }

    /// Servers that groups may be on.
    pub fn candidates(&self) -> Vec<Candidate> {
        let stays = |server: &&record::Server| server.state != ServerState::Out && !server.draining;
        let candidate = |server: &record::Server| Candidate {
            id: server.id,
            zone: server.zone.clone(),
            weight: server.total,
            open: server.state == ServerState::Up,
        };
        self.servers.values().filter(stays).map(candidate).collect()
    }

    /// The layout for new blocks of this policy.
    pub fn layout_for(&self, asked: Option<Scheme>, stripe: u32) -> Option<&Layout> {
        let fits = |layout: &&Layout| {
            layout.asked == asked && layout.groups.len() == stripe as usize && layout.replaced_by.is_none()
        };
        self.layouts.values().rev().find(fits)
    }

    /// The same; makes it if there is none, or a wider one if more servers have joined. `None` without servers enough.
    pub fn ensure_layout(
        &mut self,
        counters: &mut ClusterCounters,
        asked: Option<Scheme>,
        stripe: u32,
    ) -> Option<LayoutId> {
        let candidates = self.candidates();
        let open = candidates.iter().filter(|candidate| candidate.open).count();
        let found = self.layout_for(asked, stripe).map(|layout| (layout.id, layout.scheme));
        match (found, placement::scheme(asked, open)) {
            (Some((id, scheme)), wanted) if wanted.is_none_or(|wanted| !better(wanted, scheme, asked)) => {
                Some(id)
            }
            (_, None) => None,
            (found, Some(wanted)) => {
                let id = LayoutId(counters.next_layout.max(1));
                counters.next_layout = id.0 + 1;
                let table = placement::fresh(wanted.width(), stripe.max(1) as usize, &candidates);
                let group = |servers| Group { version: 1, servers, ..Group::default() };
                let groups = table.into_iter().map(group).collect();
                self.layouts.insert(id, Layout { id, scheme: wanted, groups, asked, replaced_by: None });
                if let Some(old) = found.and_then(|(old, _)| self.layouts.get_mut(&old)) {
                    old.replaced_by = Some(id);
                }
                Some(id)
            }
        }
    }

    /// A wider layout for every policy that has one, if servers have joined.
    pub fn widen(&mut self, counters: &mut ClusterCounters) {
        let current = self.layouts.values().filter(|layout| layout.replaced_by.is_none());
        let policies: BTreeSet<(LayoutId, u32)> =
            current.map(|layout| (layout.id, layout.groups.len() as u32)).collect();
        for (id, stripe) in policies {
            let asked = self.layouts.get(&id).and_then(|layout| layout.asked);
            self.ensure_layout(counters, asked, stripe);
        }
    }

    /// Moves groups away from servers that are out, draining or removed. Answers how many groups changed.
    pub fn evade(&mut self) -> usize {
        let candidates = self.candidates();
        let mut changed = 0;
        let layouts: Vec<LayoutId> = self.layouts.keys().copied().collect();
        for id in layouts {
            let Some(layout) = self.layouts.get(&id) else { continue };
            let targets: Vec<Vec<ServerId>> = layout.groups.iter().map(|g| g.target().to_vec()).collect();
            // A server that had the piece before and may have it again is the best successor.
            let back = |group: &Group, target: &[ServerId]| -> Vec<ServerId> {
                let stays = |id: &ServerId| candidates.iter().any(|c| c.id == *id);
                let mut target = target.to_vec();
                for piece in 0..target.len().min(group.servers.len()) {
                    let home = group.servers[piece];
                    if !stays(&target[piece]) && stays(&home) && !target.contains(&home) {
                        target[piece] = home;
                    }
                }
                target
            };
            let homed: Vec<Vec<ServerId>> =
                layout.groups.iter().zip(&targets).map(|(group, target)| back(group, target)).collect();
            for (number, target) in placement::replace(&homed, &candidates).into_iter().enumerate() {
                if targets.get(number) != Some(&target) {
                    self.aim((id, number as u32), target);
                    changed += 1;
                }
            }
        }
        changed
    }

    /// Moves groups to even out the servers, so that at most `most` groups move at once. With `dirty` also those in which pieces
    /// may be missing: a server that is full keeps its groups dirty until some leave it. With `at_once` nothing is stored yet
    /// and groups simply change. Answers how many groups changed.
    pub fn balance(&mut self, most: usize, slack: u64, dirty: bool, at_once: bool) -> usize {
        let candidates = self.candidates();
        let moving = |layout: &Layout| layout.groups.iter().filter(|g| !g.moving_to.is_empty()).count();
        let mut room = most.saturating_sub(self.layouts.values().map(moving).sum());
        let mut changed = 0;
        let layouts: Vec<LayoutId> = self.layouts.keys().copied().collect();
        for id in layouts {
            let Some(layout) = self.layouts.get(&id) else { continue };
            let targets: Vec<Vec<ServerId>> = layout.groups.iter().map(|g| g.target().to_vec()).collect();
            // A group that moves finishes first.
            let fixed = |number: usize| {
                layout
                    .groups
                    .get(number)
                    .is_none_or(|g| !g.moving_to.is_empty() || (g.dirty && !dirty && !at_once))
            };
            let width = layout.scheme.width();
            let enough = candidates.iter().filter(|candidate| candidate.open).count() >= width;
            // Where nothing has to be moved the groups are laid out anew, so that consecutive ones are on different servers again.
            let next = match at_once && enough {
                true => {
                    let mut next = placement::fresh(width, targets.len(), &candidates);
                    let stay = (0..targets.len()).filter(|number| fixed(*number));
                    stay.for_each(|number| next[number].clone_from(&targets[number]));
                    next
                }
                false => placement::balance(&targets, &candidates, room, slack, &fixed),
            };
            for (number, target) in next.into_iter().enumerate() {
                if targets.get(number) == Some(&target) {
                    continue;
                }
                changed += 1;
                room = room.saturating_sub(1);
                match (at_once, self.group_mut((id, number as u32))) {
                    (true, Some(group)) => {
                        group.servers = target;
                        group.version += 1;
                    }
                    _ => self.aim((id, number as u32), target),
                }
            }
        }
        changed
    }

    /// A group moves to these servers from now on. Where it was moving elsewhere, that is remembered.
    fn aim(&mut self, at: GroupAt, target: Vec<ServerId>) {
        let Some(group) = self.group_mut(at) else { return };
        for (piece, (old, new)) in group.moving_to.iter().zip(&target).enumerate() {
            let place = (piece as u8, *old);
            if old != new && group.servers.get(piece) != Some(old) && !group.former.contains(&place) {
                group.former.push(place);
            }
        }
        group.moving_to = if target == group.servers { Vec::new() } else { target };
        group.version += 1;
        self.mark_dirty(at);
    }

    /// This piece of blocks of the group was found on a server that the group does not name. Answers whether that is
    /// remembered: there may be too many such places.
    pub fn add_former(&mut self, at: GroupAt, place: (u8, ServerId)) -> bool {
        let Some(group) = self.group_mut(at) else { return false };
        if group.former.contains(&place) {
            return true;
        }
        if group.former.iter().filter(|(piece, _)| *piece == place.0).count() >= FOUND_MAX {
            return false;
        }
        group.former.push(place);
        group.version += 1;
        self.mark_dirty(at);
        true
    }

    /// Nothing uses these any more.
    pub fn drop_layouts(&mut self, layouts: &BTreeSet<LayoutId>) {
        self.layouts.retain(|id, _| !layouts.contains(id));
        self.dirt.retain(|(id, _), _| !layouts.contains(id));
    }

    /// Everything of the group is at its target. Dirty marks that came since `dirt` stay. Old holders may have stale pieces.
    pub fn settle(&mut self, at: GroupAt, dirt: Dirt) {
        let since = self.dirt(at);
        if since.losses != dirt.losses {
            return; // what was seen at the target may be gone: whoever had it before stays known
        }
        let again = since != dirt;
        let Some(group) = self.group_mut(at) else { return };
        let mut left: BTreeSet<ServerId> = group.former.drain(..).map(|(_, server)| server).collect();
        if !group.moving_to.is_empty() {
            let target = std::mem::take(&mut group.moving_to);
            left.extend(
                group.servers.iter().zip(&target).filter(|(old, new)| old != new).map(|(old, _)| *old),
            );
            group.servers = target;
            group.version += 1;
        }
        group.dirty = again;
        for server in left {
            self.mark_stale(server);
        }
    }

    /// How often the group was marked.
    pub fn dirt(&self, at: GroupAt) -> Dirt {
        self.dirt.get(&at).copied().unwrap_or_default()
    }

    /// Pieces of the group may be missing.
    pub fn mark_dirty(&mut self, at: GroupAt) {
        self.mark_substituted(at);
        if let Some(dirt) = self.dirt.get_mut(&at) {
            dirt.losses += 1;
        }
    }

    /// A new block of the group has pieces elsewhere. Its record names them, so that what is known of the others holds.
    pub fn mark_substituted(&mut self, at: GroupAt) {
        if let Some(group) = self.group_mut(at) {
            group.dirty = true;
            self.dirt.entry(at).or_default().marks += 1;
        }
    }

    /// Pieces of every group of this server may be missing.
    pub fn mark_server_dirty(&mut self, server: ServerId) {
        let touched: Vec<GroupAt> = self
            .groups()
            .filter(|(_, _, group)| group.target().contains(&server) || group.servers.contains(&server))
            .map(|(at, _, _)| at)
            .collect();
        touched.into_iter().for_each(|at| self.mark_dirty(at));
    }

    /// Pieces of every group may be missing; groups with a server that is down are looked at when it is back.
    pub fn mark_all_dirty(&mut self) {
        let whole = self.groups().filter(|(_, _, group)| group.target().iter().all(|id| self.is_heard(*id)));
        let touched: Vec<GroupAt> = whole.map(|(at, _, _)| at).collect();
        touched.into_iter().for_each(|at| self.mark_dirty(at));
    }

    /// The server may hold pieces that belong elsewhere.
    pub fn mark_stale(&mut self, server: ServerId) {
        if let Some(record) = self.servers.get_mut(&server) {
            record.reconcile = true;
            *self.marks.entry(server).or_default() += 1;
        }
    }

    /// All groups with their layouts.
    pub fn groups(&self) -> impl Iterator<Item = (GroupAt, &Layout, &Group)> {
        self.layouts.values().flat_map(|layout| {
            layout
                .groups
                .iter()
                .enumerate()
                .map(move |(number, group)| ((layout.id, number as u32), layout, group))
        })
    }

    /// A group.
    pub fn group(&self, at: GroupAt) -> Option<&Group> {
        self.layouts.get(&at.0)?.groups.get(at.1 as usize)
    }

    fn group_mut(&mut self, at: GroupAt) -> Option<&mut Group> {
        self.layouts.get_mut(&at.0)?.groups.get_mut(at.1 as usize)
    }

    /// The group of a block.
    pub fn group_of(&self, layout: LayoutId, block: BlockId) -> Option<(GroupAt, &Layout, &Group)> {
        let layout = self.layouts.get(&layout)?;
        let number = layout.group_of(block);
        Some(((layout.id, number as u32), layout, layout.groups.get(number)?))
    }

    /// All groups but those of layouts that nothing uses.
    pub fn needed_groups<'a>(
        &'a self,
        idle: &'a BTreeSet<LayoutId>,
    ) -> impl Iterator<Item = (GroupAt, &'a Layout, &'a Group)> {
        self.groups().filter(|(at, _, _)| !idle.contains(&at.0))
    }

    /// Places in groups that name the server, but for layouts that nothing uses.
    pub fn places(&self, server: ServerId, idle: &BTreeSet<LayoutId>) -> u32 {
        self.all_places(idle).get(&server).copied().unwrap_or(0)
    }

    /// The same of all servers at once.
    pub fn all_places(&self, idle: &BTreeSet<LayoutId>) -> BTreeMap<ServerId, u32> {
        let mut places = BTreeMap::new();
        for (_, _, group) in self.needed_groups(idle) {
            let former = group.former.iter().map(|(_, server)| server);
            for server in group.servers.iter().chain(&group.moving_to).chain(former) {
                *places.entry(*server).or_default() += 1;
            }
        }
        places
    }

    /// Those of the server's places that no other server can take: too few are left for the group's width.
    pub fn stuck(&self, server: ServerId, idle: &BTreeSet<LayoutId>) -> u32 {
        let open = self.candidates();
        let stays = |group: &&Group| {
            let free = open.iter().any(|candidate| !group.target().contains(&candidate.id));
            group.target().contains(&server) && !free
        };
        self.needed_groups(idle).map(|(_, _, group)| group).filter(stays).count() as u32
    }

    /// Where the pieces of a new block are, relative to its group's target of now: what differs, and the group if
    /// something does.
    pub fn substitutes(&self, block: &NewBlock) -> Result<(Substitutes, Option<GroupAt>)> {
        let Some((at, layout, group)) = self.group_of(block.layout, block.id) else {
            return Err(Fault::new(
                Code::StalePlacement,
                format!("block {} names layout {}, which is not there", block.id, block.layout),
            ));
        };
        let substituted = block.substitutes.iter().map(|(_, server)| server);
        if let Some(gone) = block.servers.iter().chain(substituted).find(|id| !self.servers.contains_key(id))
        {
            // What is there is gone with it, and nobody would look for it elsewhere.
            return Err(Fault::new(
                Code::StalePlacement,
                format!("block {} names data server {gone}, which was removed", block.id),
            ));
        }
        if block.servers.is_empty() {
            let at = (!block.substitutes.is_empty()).then_some(at);
            return Ok((block.substitutes.clone(), at));
        }
        let pieces = layout.scheme.pieces(block.len);
        if block.servers.len() != pieces {
            let named = block.servers.len();
            return Err(Fault::new(
                Code::Invalid,
                format!("block {} has {pieces} pieces but its commit names {named} servers", block.id),
            ));
        }
        let pairs = block.servers.iter().zip(group.target()).enumerate();
        let substitutes: Vec<(u8, ServerId)> = pairs
            .filter(|(_, (is, target))| is != target)
            .map(|(piece, (is, _))| (piece as u8, *is))
            .collect();
        let at = (!substitutes.is_empty()).then_some(at);
        Ok((substitutes, at))
    }

    /// Every server that may hold this piece of a block: where the record says, then the group's.
    pub fn holders_of(&self, group: &Group, piece: u8, substitutes: &[(u8, ServerId)]) -> Vec<ServerId> {
        let index = usize::from(piece);
        let mut holders: Vec<ServerId> = Vec::new();
        let substituted = substitutes.iter().filter(|(other, _)| *other == piece).map(|(_, server)| *server);
        let former = group.former.iter().filter(|(other, _)| *other == piece).map(|(_, server)| *server);
        let named = [group.target().get(index).copied(), group.servers.get(index).copied()];
        for server in substituted.chain(named.into_iter().flatten()).chain(former) {
            if !holders.contains(&server) {
                holders.push(server);
            }
        }
        holders
    }

    /// Every server that may hold any piece of this block.
    pub fn holders(&self, id: BlockId, layout: LayoutId, substitutes: &[(u8, ServerId)]) -> Vec<ServerId> {
        let mut holders: Vec<ServerId> = substitutes.iter().map(|(_, server)| *server).collect();
        if let Some((_, _, group)) = self.group_of(layout, id) {
            holders.extend(&group.servers);
            holders.extend(&group.moving_to);
            holders.extend(group.former.iter().map(|(_, server)| *server));
        }
        holders.sort_unstable();
        holders.dedup();
        holders.retain(|server| self.servers.contains_key(server));
        holders
    }

    /// Whether the server is there, as far as its heartbeats tell.
    pub fn is_heard(&self, id: ServerId) -> bool {
        self.servers.get(&id).is_some_and(|server| server.state < ServerState::Down)
    }

    /// Whether a server that should have pieces of the group is not heard of.
    pub fn lacks_server(&self, group: &Group) -> bool {
        !group.servers.iter().chain(&group.moving_to).all(|id| self.is_heard(*id))
    }

    /// How many more losses the group survives: pieces on servers that are heard of, beyond what a reader needs.
    pub fn margin(&self, layout: &Layout, group: &Group) -> i64 {
        // Where a group moves to, it does not have its old pieces yet.
        let living = group.servers.iter().filter(|server| self.is_heard(**server)).count();
        living as i64 - (layout.scheme.width() - layout.scheme.tolerates()) as i64
    }
}

/// Whether the wanted scheme is closer to what was asked for than the one there is.
fn better(wanted: Scheme, is: Scheme, asked: Option<Scheme>) -> bool {
    wanted != is && (asked == Some(wanted) || wanted.tolerates() > is.tolerates())
}
