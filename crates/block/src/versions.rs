//! How new the placement groups are, as far as this server was told: puts under an older version are refused.
//!
//! That saves work, not data: a piece that was put where its group no longer is would have to be moved. The commit
//! that names the block says where every piece really is, whatever happened here.

use std::collections::HashMap;

use parking_lot::RwLock;
use torchfs_proto::{BlockId, Code, Fault, LayoutId};

/// What heartbeats and puts have told so far.
#[derive(Default)]
pub(crate) struct Versions(RwLock<Known>);

#[derive(Default)]
struct Known {
    placement: u64,
    /// By layout and group.
    groups: HashMap<LayoutId, Vec<u32>>,
}

impl Versions {
    /// The version of the placement that is known; 0 before the first heartbeat was answered.
    pub fn placement(&self) -> u64 {
        self.0.read().placement
    }

    /// The metadata service told the versions of all groups, if there are any newer ones.
    pub fn learn(&self, placement: u64, groups: Vec<(LayoutId, Vec<u32>)>) {
        let mut known = self.0.write();
        if placement < known.placement || groups.is_empty() {
            return;
        }
        known.placement = placement;
        let mut fresh: HashMap<LayoutId, Vec<u32>> = groups.into_iter().collect();
        for (layout, versions) in &mut fresh {
            // A put may have told of a newer one meanwhile.
            for (version, other) in versions.iter_mut().zip(known.groups.get(layout).into_iter().flatten()) {
                *version = (*version).max(*other);
            }
        }
        known.groups = fresh;
    }

    /// Refuses a put under an older version than is known; remembers a newer one.
    pub fn check(&self, block: BlockId, layout: LayoutId, version: u32) -> Result<(), Fault> {
        let newest = self.0.read().find(block, layout);
        match newest {
            Some(newest) if version < newest => {
                let what = format!(
                    "block {block} was placed by version {version} of its group; this server knows {newest}"
                );
                Err(Fault::new(Code::StalePlacement, what))
            }
            Some(newest) if version > newest => {
                let mut known = self.0.write();
                if let Some(versions) = known.groups.get_mut(&layout)
                    && let Some(at) = group_of(block, versions.len())
                {
                    versions[at] = versions[at].max(version);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Known {
    fn find(&self, block: BlockId, layout: LayoutId) -> Option<u32> {
        let versions = self.groups.get(&layout)?;
        Some(versions[group_of(block, versions.len())?])
    }
}

/// As `Layout::group_of` has it.
fn group_of(block: BlockId, groups: usize) -> Option<usize> {
    (groups > 0).then(|| (block.counter % groups as u64) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn puts_under_an_older_version_are_refused_and_newer_ones_remembered() {
        let versions = Versions::default();
        let block = |counter| BlockId { incarnation: 1, counter };
        let layout = LayoutId(3);
        assert!(versions.check(block(1), layout, 0).is_ok(), "nothing is known yet");
        versions.learn(9, vec![(layout, vec![4, 7])]);
        assert_eq!(versions.placement(), 9);
        assert!(versions.check(block(2), layout, 4).is_ok());
        let stale = versions.check(block(3), layout, 6).map_err(|fault| fault.code);
        assert_eq!(stale, Err(Code::StalePlacement));
        assert!(versions.check(block(3), layout, 8).is_ok());
        assert!(versions.check(block(5), layout, 7).is_err(), "a put told of version 8");
        versions.learn(8, vec![(layout, vec![0, 0])]);
        versions.learn(9, vec![(layout, vec![4, 7]), (LayoutId(4), vec![1])]);
        assert!(versions.check(block(5), layout, 7).is_err(), "nothing is forgotten");
        assert!(versions.check(block(5), LayoutId(4), 1).is_ok());
        assert!(versions.check(block(5), LayoutId(5), 0).is_ok(), "a layout that is not known yet");
    }
}
