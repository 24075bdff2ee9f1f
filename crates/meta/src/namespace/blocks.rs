//! Block records: how many extents point into a block and how many of its bytes they cover.
//!
//! An operation gathers what it adds and takes away and writes the sum once, so a block that many extents of one commit
//! touch is read and written once.

use std::collections::BTreeMap;

use torchfs_proto::extent::NewBlock;
use torchfs_proto::record::{Block, DeadBlock};
use torchfs_proto::{BlockId, Code, Fault, Result, key};

use crate::view::View;

/// Changes of block records, gathered.
#[derive(Debug, Default)]
pub struct BlockChanges {
    sums: BTreeMap<BlockId, Sum>,
}

#[derive(Debug, Default)]
struct Sum {
    references: i64,
    live: i64,
    new: Option<NewBlock>,
}

impl BlockChanges {
    /// A block that is named for the first time.
    pub fn introduce(&mut self, block: NewBlock) {
        let id = block.id;
        self.sums.entry(id).or_default().new = Some(block);
    }

    /// Whether the block is new in this batch.
    pub fn introduced(&self, id: BlockId) -> Option<&NewBlock> {
        self.sums.get(&id)?.new.as_ref()
    }

    /// Extents come or go.
    pub fn add(&mut self, id: BlockId, references: i64, live: i64) {
        let sum = self.sums.entry(id).or_default();
        sum.references += references;
        sum.live += live;
    }

    /// Writes the records. A block that nothing points into any more goes to the queue of the dead.
    pub fn apply(self, view: &mut View<'_>) -> Result<()> {
        let (mut blocks, mut bytes, mut stored, mut dead) = (0i64, 0i64, 0i64, 0u64);
        for (id, sum) in self.sums {
            let at = key::block(view.volume, id);
            let (mut block, fresh) = match sum.new {
                Some(new) => {
                    let substitutes = (!new.substitutes.is_empty()).then_some(new.substitutes);
                    let (len, stored, layout) = (new.len, new.stored, new.layout);
                    (
                        Block { born: view.born, len, stored, layout, references: 0, live: 0, substitutes },
                        true,
                    )
                }
                None if sum.references == 0 && sum.live == 0 => continue,
                None => match view.get::<Block>(&at)? {
                    Some(block) => (block, false),
                    None => return Err(damage(id, "has extents but no record")),
                },
            };
            let references = i64::from(block.references) + sum.references;
            let live = i64::try_from(block.live).unwrap_or(i64::MAX) + sum.live;
            block.references = u32::try_from(references).map_err(|_| damage(id, "has too few references"))?;
            block.live = u64::try_from(live).map_err(|_| damage(id, "has too few live bytes"))?;
            if block.references > 0 {
                view.put(at, &block);
            } else {
                let gone =
                    DeadBlock { born: view.born, layout: block.layout, substitutes: block.substitutes };
                view.put(key::dead_block(view.volume, view.due_ms, id), &gone);
                dead += 1;
                if !fresh {
                    view.delete(at);
                }
            }
            let by = i64::from(block.references > 0) - i64::from(!fresh);
            blocks += by;
            bytes += by * i64::from(block.len);
            stored += by * i64::try_from(block.stored).unwrap_or(i64::MAX);
        }
        if blocks != 0 || bytes != 0 || stored != 0 || dead != 0 {
            view.count(|counters| {
                counters.blocks = counters.blocks.saturating_add_signed(blocks);
                counters.bytes = counters.bytes.saturating_add_signed(bytes);
                counters.stored = counters.stored.saturating_add_signed(stored);
                counters.dead += dead;
            })?;
        }
        Ok(())
    }
}

fn damage(id: BlockId, what: &str) -> Fault {
    Fault::new(Code::Corrupt, format!("block {id} {what}")).next("run `torchfs fsck`")
}
