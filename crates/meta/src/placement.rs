//! Placement: which servers hold which group. Pure.
//!
//! Every server gets a share of the places in proportion to its capacity, and each group has its pieces in as many zones as
//! it can. A change of servers moves as few groups as it takes: places of servers that go are filled by others, and
//! balancing moves single places from those with too many to those with too few. Consecutive blocks of a file are in
//! neighbouring groups, so what a server holds stays spread out over the numbers of groups, whatever joins and goes.
//!
//! # Invariants
//! - The table follows from its arguments alone, in whole numbers, and is written down once made; no hash takes part.
//! - A server has at most one piece of a group.
//! - A place for which there is nobody stays as it is.

use torchfs_proto::ServerId;
use torchfs_proto::layout::Scheme;

/// A server that groups may be on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// Its number.
    pub id: ServerId,
    /// Its failure domain.
    pub zone: String,
    /// Its capacity; 0 counts as the smallest that is known.
    pub weight: u64,
    /// It may get places that it does not have.
    pub open: bool,
}

/// The redundancy of new data on so many servers. What was asked for is kept: if no scheme on these servers survives as many
/// losses, there is none, and writing waits for more servers. Where nothing was asked for, one server is enough.
pub fn scheme(asked: Option<Scheme>, servers: usize) -> Option<Scheme> {
    let fits = |scheme: &Scheme| scheme.width() <= servers;
    match asked {
        None => [2, 1].map(Scheme::Replicas).into_iter().find(fits),
        // Too few servers for the pieces: as many copies as survive the same losses.
        Some(ec @ Scheme::Ec { parity, .. }) => {
            [ec, Scheme::Replicas(parity.saturating_add(1))].into_iter().find(fits)
        }
        Some(copies) => Some(copies).filter(fits),
    }
}

/// The groups of a new layout. Consecutive groups begin on different servers, so that one file streams from all.
pub fn fresh(width: usize, groups: usize, candidates: &[Candidate]) -> Vec<Vec<ServerId>> {
    let open: Vec<Candidate> = candidates.iter().filter(|candidate| candidate.open).cloned().collect();
    if open.is_empty() {
        return Vec::new();
    }
    let weights = weights(&open);
    let mut used = vec![0u64; open.len()];
    let mut together = Together::new(open.len());
    let mut at = vec![vec![0u64; open.len()]; width];
    let mut table = Vec::with_capacity(groups);
    for group in 0..groups {
        let mut members: Vec<usize> = Vec::with_capacity(width);
        for piece in 0..width {
            let turn = |index: usize| (index + open.len() - (group + piece) % open.len()) % open.len();
            let best = (0..open.len()).filter(|index| !members.contains(index)).min_by_key(|&index| {
                let zone = in_zone(&open, &members, index);
                (zone, due(used[index], weights[index]), together.with(&members, index), turn(index))
            });
            if let Some(best) = best {
                used[best] += 1;
                members.push(best);
            }
        }
        together.add(&members);
        let mut ordered = Vec::with_capacity(members.len());
        for (piece, counts) in at.iter_mut().enumerate().take(members.len()) {
            let turn = |index: usize| (index + open.len() - (group + piece) % open.len()) % open.len();
            let first = members
                .iter()
                .enumerate()
                .min_by_key(|&(_, &index)| (due(counts[index], weights[index]), turn(index)))
                .map(|(place, _)| place);
            if let Some(place) = first {
                let index = members.swap_remove(place);
                counts[index] += 1;
                ordered.push(open[index].id);
            }
        }
        table.push(ordered);
    }
    table
}

/// The same groups without servers that are no candidates: each of their places goes to a server that is open, in a
/// zone that the group has least, and that is furthest below its share.
pub fn replace(table: &[Vec<ServerId>], candidates: &[Candidate]) -> Vec<Vec<ServerId>> {
    let weights = weights(candidates);
    let place_of = |id: &ServerId| candidates.iter().position(|candidate| candidate.id == *id);
    let mut used = counts(table, candidates);
    let mut together = Together::of(table, candidates);
    let mut table = table.to_vec();
    for group in &mut table {
        for piece in 0..group.len() {
            if place_of(&group[piece]).is_some() {
                continue;
            }
            let members: Vec<usize> = group.iter().filter_map(place_of).collect();
            let open = |index: &usize| candidates[*index].open && !members.contains(index);
            let best = (0..candidates.len()).filter(open).min_by_key(|&index| {
                let zone = in_zone(candidates, &members, index);
                (zone, due(used[index], weights[index]), together.with(&members, index), index)
            });
            if let Some(best) = best {
                used[best] += 1;
                group[piece] = candidates[best].id;
                together.pair(&members, best);
            }
        }
    }
    table
}

/// The same groups, closer to everybody's share: at most `moves` of them change, one place each. Servers may have up to a
/// `slack`-th more than their share (0: exactly their share). `fixed` groups stay.
pub fn balance(
    table: &[Vec<ServerId>],
    candidates: &[Candidate],
    moves: usize,
    slack: u64,
    fixed: &dyn Fn(usize) -> bool,
) -> Vec<Vec<ServerId>> {
    let width = table.first().map_or(0, Vec::len);
    let shares = shares(width * table.len(), table.len(), candidates);
    let place_of = |id: &ServerId| candidates.iter().position(|candidate| candidate.id == *id);
    let mut used = counts(table, candidates);
    let mut table = table.to_vec();
    let mut moved = vec![false; table.len()];
    for _ in 0..moves {
        let found = better_zone(&table, candidates, &used, &shares, &|group| moved[group] || fixed(group))
            .or_else(|| {
                better_share(&table, candidates, &used, &shares, slack, &|group| moved[group] || fixed(group))
            });
        let Some((group, piece, to)) = found else { break };
        if let Some(from) = place_of(&table[group][piece]) {
            used[from] = used[from].saturating_sub(1);
        }
        used[to] += 1;
        table[group][piece] = candidates[to].id;
        moved[group] = true;
    }
    table
}

/// A place that can move into a zone that its group has less.
fn better_zone(
    table: &[Vec<ServerId>],
    candidates: &[Candidate],
    used: &[u64],
    shares: &[u64],
    fixed: &dyn Fn(usize) -> bool,
) -> Option<(usize, usize, usize)> {
    for (number, group) in table.iter().enumerate().filter(|(number, _)| !fixed(*number)) {
        for piece in 0..group.len() {
            let Some(from) = candidates.iter().position(|c| c.id == group[piece]) else { continue };
            let others = others(group, piece, candidates);
            let crowd = in_zone(candidates, &others, from);
            let to = (0..candidates.len())
                .filter(|to| candidates[*to].open && !others.contains(to) && *to != from)
                .filter(|to| in_zone(candidates, &others, *to) < crowd && shares[*to] > 0)
                .min_by_key(|&to| (in_zone(candidates, &others, to), due(used[to], shares[to]), to));
            if let Some(to) = to {
                return Some((number, piece, to));
            }
        }
    }
    None
}

/// A place of the server that is furthest above its share, for the one that is furthest below: in a group whose neighbours
/// are mostly on the first and hardly on the second.
fn better_share(
    table: &[Vec<ServerId>],
    candidates: &[Candidate],
    used: &[u64],
    shares: &[u64],
    slack: u64,
    fixed: &dyn Fn(usize) -> bool,
) -> Option<(usize, usize, usize)> {
    let allowed = |index: usize| shares[index] + shares[index].checked_div(slack).unwrap_or(0);
    let wanting = |index: usize| shares[index] - shares[index].checked_div(slack).unwrap_or(0);
    let mut rich: Vec<usize> = (0..candidates.len()).filter(|&i| used[i] > shares[i]).collect();
    let mut poor: Vec<usize> =
        (0..candidates.len()).filter(|&i| candidates[i].open && used[i] < shares[i]).collect();
    if !rich.iter().any(|&i| used[i] > allowed(i)) && !poor.iter().any(|&i| used[i] < wanting(i)) {
        return None;
    }
    rich.sort_by_key(|&i| (std::cmp::Reverse(used[i] - shares[i]), i));
    poor.sort_by_key(|&i| (std::cmp::Reverse(shares[i] - used[i]), i));
    let together = Together::of(table, candidates);
    let held = Held::of(table, candidates);
    for &from in &rich {
        for &to in &poor {
            let groups = table.iter().enumerate().filter(|(number, _)| !fixed(*number));
            let best = groups.filter_map(|(number, group)| {
                let piece = group.iter().position(|id| *id == candidates[from].id)?;
                let others = others(group, piece, candidates);
                let zone = in_zone(candidates, &others, to) <= in_zone(candidates, &others, from);
                let gain = || held.near(from, number) - held.near(to, number);
                let partners = || PARTNER * together.with(&others, to) as i64;
                (!others.contains(&to) && zone).then(|| (partners() - gain(), number, piece))
            });
            if let Some((_, number, piece)) = best.min() {
                return Some((number, piece, to));
            }
        }
    }
    None
}

/// Which groups each server holds a piece of.
struct Held(Vec<Vec<bool>>);

/// What holding the very next group costs. One that is `n` away costs an `n`-th of it.
const NEXT: i64 = 1 << 20;
/// Groups further away than this do not matter.
const REACH: usize = 64;
/// What one more group with the same partner costs.
const PARTNER: i64 = NEXT / 10;

impl Held {
    fn of(table: &[Vec<ServerId>], candidates: &[Candidate]) -> Held {
        let holds = |candidate: &Candidate| table.iter().map(|group| group.contains(&candidate.id)).collect();
        Held(candidates.iter().map(holds).collect())
    }

    /// How close the server's other groups are to this one; after the last group comes the first.
    fn near(&self, index: usize, group: usize) -> i64 {
        let held = &self.0[index];
        let groups = held.len();
        let costs = (1..=REACH.min(groups / 2)).map(|away| {
            let (up, down) = ((group + away) % groups, (group + groups - away) % groups);
            let sides = i64::from(held[up]) + i64::from(held[down] && down != up);
            sides * NEXT / away as i64
        });
        costs.sum()
    }
}

/// How often two servers share a group: partners are spread, so that all others help to repair a loss.
struct Together(Vec<Vec<u64>>);

impl Together {
    fn of(table: &[Vec<ServerId>], candidates: &[Candidate]) -> Together {
        let place_of = |id: &ServerId| candidates.iter().position(|candidate| candidate.id == *id);
        let mut together = Together::new(candidates.len());
        for group in table {
            together.add(&group.iter().filter_map(place_of).collect::<Vec<_>>());
        }
        together
    }

    fn new(servers: usize) -> Together {
        Together(vec![vec![0; servers]; servers])
    }

    fn with(&self, members: &[usize], index: usize) -> u64 {
        members.iter().map(|member| self.0[*member][index]).sum()
    }

    fn pair(&mut self, members: &[usize], index: usize) {
        for member in members {
            self.0[*member][index] += 1;
            self.0[index][*member] += 1;
        }
    }

    fn add(&mut self, members: &[usize]) {
        for (count, index) in members.iter().enumerate() {
            self.pair(&members[..count], *index);
        }
    }
}

/// The members of a group beside this piece.
fn others(group: &[ServerId], piece: usize, candidates: &[Candidate]) -> Vec<usize> {
    let beside = group.iter().enumerate().filter(|(other, _)| *other != piece);
    beside.filter_map(|(_, id)| candidates.iter().position(|candidate| candidate.id == *id)).collect()
}

/// How many of these members are in the zone of that candidate.
fn in_zone(candidates: &[Candidate], members: &[usize], index: usize) -> usize {
    members.iter().filter(|member| candidates[**member].zone == candidates[index].zone).count()
}

/// Who is due first: the places held, and one more, against the weight.
fn due(used: u64, weight: u64) -> u128 {
    (u128::from(used) + 1) * (1 << 40) / u128::from(weight.max(1))
}

fn weights(candidates: &[Candidate]) -> Vec<u64> {
    let known = candidates.iter().map(|candidate| candidate.weight).filter(|weight| *weight > 0).min();
    candidates
        .iter()
        .map(|candidate| if candidate.weight > 0 { candidate.weight } else { known.unwrap_or(1) })
        .collect()
}

fn counts(table: &[Vec<ServerId>], candidates: &[Candidate]) -> Vec<u64> {
    let count =
        |candidate: &Candidate| table.iter().flatten().filter(|id| **id == candidate.id).count() as u64;
    candidates.iter().map(count).collect()
}

/// How many of these places each server should have: in proportion to its weight, at most one in each group.
fn shares(places: usize, groups: usize, candidates: &[Candidate]) -> Vec<u64> {
    let weights = weights(candidates);
    let most = groups as u64;
    let mut shares = vec![0u64; candidates.len()];
    let mut left = places as u64;
    let mut open: Vec<usize> = (0..candidates.len()).collect();
    loop {
        let sum: u128 = open.iter().map(|i| u128::from(weights[*i])).sum();
        let over = open
            .iter()
            .position(|i| sum > 0 && u128::from(left) * u128::from(weights[*i]) >= u128::from(most) * sum);
        match over {
            Some(at) => {
                let index = open.remove(at);
                shares[index] = most.min(left);
                left -= shares[index];
            }
            None => {
                let mut rests: Vec<(u128, usize)> = Vec::new();
                let mut given = 0;
                for &index in &open {
                    let exact = u128::from(left) * u128::from(weights[index]);
                    shares[index] = exact.checked_div(sum).unwrap_or(0) as u64;
                    given += shares[index];
                    rests.push((exact.checked_rem(sum).unwrap_or(0), index));
                }
                rests.sort_by_key(|(rest, index)| (std::cmp::Reverse(*rest), *index));
                for (_, index) in rests.into_iter().take(left.saturating_sub(given) as usize) {
                    shares[index] += 1;
                }
                return shares;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(zones: &[(&str, u64)]) -> Vec<Candidate> {
        let server = |(index, (zone, weight)): (usize, &(&str, u64))| Candidate {
            id: ServerId(index as u32 + 1),
            zone: zone.to_string(),
            weight: *weight,
            open: true,
        };
        zones.iter().enumerate().map(server).collect()
    }

    fn numbers(table: &[Vec<ServerId>]) -> Vec<Vec<u32>> {
        table.iter().map(|group| group.iter().map(|id| id.0).collect()).collect()
    }

    fn free(_: usize) -> bool {
        false
    }

    #[test]
    fn the_table_is_this_one_forever() {
        let equal = servers(&[("", 8), ("", 8), ("", 8)]);
        assert_eq!(numbers(&fresh(2, 6, &equal)), [[1, 2], [3, 1], [2, 3], [1, 2], [3, 1], [2, 3]]);
        let zoned = servers(&[("a", 1), ("a", 1), ("b", 1), ("c", 1)]);
        assert_eq!(
            numbers(&fresh(3, 4, &zoned)),
            [[1, 3, 4], [2, 4, 3], [3, 1, 4], [4, 2, 3]],
            "each group is in all three zones"
        );
        let heavy = servers(&[("", 10), ("", 10), ("", 20)]);
        assert_eq!(numbers(&fresh(1, 8, &heavy)), [[3], [2], [3], [1], [3], [3], [1], [2]]);
        let without = servers(&[("", 8), ("", 8), ("", 8), ("", 8)])[..3].to_vec();
        let before = fresh(2, 4, &servers(&[("", 8), ("", 8), ("", 8), ("", 8)]));
        assert_eq!(numbers(&before), [[1, 2], [3, 4], [3, 1], [4, 2]]);
        assert_eq!(numbers(&replace(&before, &without)), [[1, 2], [3, 2], [3, 1], [1, 2]]);
    }

    #[test]
    fn shares_follow_capacity_and_never_exceed_one_place_in_each_group() {
        assert_eq!(shares(12, 6, &servers(&[("", 1), ("", 1), ("", 1)])), [4, 4, 4]);
        assert_eq!(shares(128, 64, &servers(&[("", 1), ("", 1), ("", 1)])), [43, 43, 42]);
        assert_eq!(shares(8, 4, &servers(&[("", 100), ("", 1), ("", 1)])), [4, 2, 2]);
        assert_eq!(shares(6, 2, &servers(&[("", 1), ("", 1)])), [2, 2]);
        assert_eq!(shares(4, 4, &servers(&[("", 0), ("", 0)])), [2, 2]);
    }

    #[test]
    fn balancing_moves_just_enough_to_a_new_server_and_then_rests() {
        let two = servers(&[("", 8), ("", 8)]);
        let three = servers(&[("", 8), ("", 8), ("", 8)]);
        let before = fresh(2, 12, &two);
        let after = balance(&before, &three, usize::MAX, 0, &free);
        let moved = before.iter().zip(&after).filter(|(a, b)| a != b).count();
        assert_eq!((moved, counts(&after, &three)), (8, vec![8, 8, 8]));
        assert_eq!(balance(&after, &three, usize::MAX, 0, &free), after);
        let few = balance(&before, &three, 3, 0, &free);
        assert_eq!(before.iter().zip(&few).filter(|(a, b)| a != b).count(), 3);
    }

    /// The most of `window` neighbouring groups that one server holds.
    fn crowd(table: &[Vec<ServerId>], candidates: &[Candidate], window: usize) -> usize {
        let held = Held::of(table, candidates).0;
        let within = |held: &Vec<bool>, from: usize| {
            (from..from + window).filter(|group| held[group % table.len()]).count()
        };
        let most = |held: &Vec<bool>| (0..table.len()).map(|from| within(held, from)).max();
        held.iter().filter_map(most).max().unwrap_or(0)
    }

    /// Servers of the same size join one by one a cluster that holds data, and a few groups move at a time.
    fn joined(width: usize, groups: usize) -> Vec<(Vec<Candidate>, Vec<Vec<ServerId>>, usize)> {
        let all = servers(&[("", 8); 8]);
        let mut table = fresh(width, groups, &all[..width]);
        let mut steps = Vec::new();
        for count in width + 1..=all.len() {
            let mut moves = 0;
            loop {
                let next = balance(&table, &all[..count], 8, 0, &free);
                let changed = table.iter().zip(&next).filter(|(a, b)| a != b).count();
                if changed == 0 {
                    break;
                }
                (table, moves) = (next, moves + changed);
            }
            steps.push((all[..count].to_vec(), table.clone(), moves));
        }
        steps
    }

    #[test]
    fn neighbouring_groups_stay_on_different_servers_while_servers_join() {
        for width in [1, 2, 3, 6] {
            for groups in [24, 64, 256] {
                for (candidates, table, moves) in joined(width, groups) {
                    let servers = candidates.len();
                    let places = counts(&table, &candidates);
                    let share = groups * width / servers;
                    assert!(places.iter().all(|&p| p as usize == share || p as usize == share + 1));
                    assert!(moves == share || moves == share + 1, "{moves} moves to one of {servers}");
                    for window in [8, 16, 32] {
                        let even = (window * width).div_ceil(servers);
                        let most = crowd(&table, &candidates, window.min(groups));
                        assert!(
                            most <= even + 2,
                            "{most} of {window} groups in a row are on one of {servers} servers, {even} would be even"
                        );
                    }
                }
            }
        }
        // With one copy no two consecutive blocks are on one server.
        for (candidates, table, _) in joined(1, 64) {
            assert_eq!(crowd(&table, &candidates, 2), 1, "{:?}", numbers(&table));
        }
    }

    #[test]
    fn what_moves_to_a_server_that_joins_is_this_forever() {
        let [(_, two, _), (_, three, _), ..] = &joined(1, 12)[..] else { panic!("two joined") };
        assert_eq!(numbers(two).concat(), [2, 2, 1, 2, 1, 1, 2, 2, 1, 2, 1, 1]);
        assert_eq!(numbers(three).concat(), [2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1]);
        let pairs = &joined(2, 9)[0].1;
        assert_eq!(numbers(pairs), [[3, 2], [2, 1], [1, 3], [2, 3], [1, 3], [2, 1], [3, 2], [3, 1], [1, 2]]);
    }

    #[test]
    fn balancing_gives_each_group_as_many_zones_as_there_are() {
        let one = servers(&[("a", 8), ("a", 8), ("b", 0)])[..2].to_vec();
        let zoned = servers(&[("a", 8), ("a", 8), ("b", 8)]);
        let after = balance(&fresh(2, 8, &one), &zoned, usize::MAX, 0, &free);
        assert!(after.iter().all(|group| group.contains(&ServerId(3))), "{after:?}");
        assert_eq!(balance(&after, &zoned, usize::MAX, 0, &free), after);
    }

    #[test]
    fn small_differences_move_nothing_by_themselves() {
        let even = servers(&[("", 100), ("", 100), ("", 100)]);
        let table = fresh(2, 60, &even);
        let odd = servers(&[("", 100), ("", 98), ("", 101)]);
        assert_eq!(balance(&table, &odd, usize::MAX, 20, &free), table);
    }

    #[test]
    fn a_place_without_a_successor_stays() {
        let two = servers(&[("", 8), ("", 8)]);
        let table = fresh(2, 2, &two);
        assert_eq!(replace(&table, &two[..1]), table);
        let closed: Vec<Candidate> =
            two.iter().map(|c| Candidate { open: c.id.0 == 1, ..c.clone() }).collect();
        assert_eq!(replace(&[vec![ServerId(9), ServerId(2)]], &closed), [[ServerId(1), ServerId(2)]]);
    }

    #[test]
    fn redundancy_that_was_asked_for_is_never_less() {
        let coded = Scheme::Ec { data: 4, parity: 2 };
        assert_eq!(scheme(None, 0), None);
        assert_eq!(scheme(None, 1), Some(Scheme::Replicas(1)));
        assert_eq!(scheme(None, 5), Some(Scheme::Replicas(2)));
        assert_eq!(scheme(Some(Scheme::Replicas(3)), 3), Some(Scheme::Replicas(3)));
        assert_eq!(scheme(Some(Scheme::Replicas(3)), 2), None);
        assert_eq!(scheme(Some(coded), 6), Some(coded));
        assert_eq!(scheme(Some(coded), 5), Some(Scheme::Replicas(3)));
        assert_eq!(scheme(Some(coded), 2), None);
        for asked in [Scheme::Replicas(1), Scheme::Replicas(2), Scheme::Replicas(8), coded] {
            let given = (0..12).filter_map(|servers| scheme(Some(asked), servers));
            assert!(given.into_iter().all(|given| given.tolerates() >= asked.tolerates()));
        }
    }
}
