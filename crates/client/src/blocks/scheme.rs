//! How a block becomes pieces and where they are: the one place that knows what redundancy means.
//!
//! With replicas every piece is the whole block. With an erasure code the pieces are as `codec::erasure` makes them; its small
//! blocks are copied instead, one copy more than may be lost, on the first servers of their group.

use torchfs_codec::erasure::Code;
use torchfs_proto::layout::{Group, Layout, Scheme};
use torchfs_proto::{BlockId, Fault, Result, ServerId};

/// The pieces of one block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape<'a> {
    /// The code, unless each piece is a copy of the block.
    pub code: Option<Code>,
    /// How many pieces there are.
    pub pieces: u8,
    pub group: &'a Group,
}

impl<'a> Shape<'a> {
    /// Of a block of this many bytes.
    pub fn of(layout: &'a Layout, block: BlockId, len: u32) -> Result<Shape<'a>> {
        let nowhere = |why: &str| {
            let what = format!("block {block} of layout {} ({}) {why}", layout.id, layout.scheme);
            Fault::new(torchfs_proto::Code::Invalid, what).next("add data servers to the cluster")
        };
        let group = layout
            .groups
            .get(layout.group_of(block))
            .filter(|group| !group.servers.is_empty())
            .ok_or_else(|| nowhere("has no servers"))?;
        let (code, pieces) = match layout.scheme {
            Scheme::Replicas(_) => (None, group.target().len()),
            Scheme::Ec { data, parity } => {
                let code = Code { data, parity };
                match code.applies(len) {
                    true => (Some(code), code.width()),
                    false => (None, usize::from(parity) + 1),
                }
            }
        };
        match u8::try_from(pieces) {
            Ok(pieces) if group.target().len() >= usize::from(pieces) => Ok(Shape { code, pieces, group }),
            _ => Err(nowhere("has more pieces than servers")),
        }
    }

    /// Where a new piece belongs.
    pub fn home(&self, piece: u8) -> Option<ServerId> {
        self.group.target().get(usize::from(piece)).copied()
    }

    /// Where a piece may be, the likeliest first: the place it was put to when that was not its home, its home, the home it
    /// moves to, and those it was to move to before.
    pub fn places(&self, piece: u8, substitutes: &[(u8, ServerId)]) -> Vec<ServerId> {
        let at = usize::from(piece);
        let substitutes = substitutes.iter().filter(|(n, _)| *n == piece).map(|(_, server)| *server);
        let homes = [&self.group.servers, &self.group.moving_to];
        let mut places: Vec<ServerId> = Vec::with_capacity(2);
        let homes = homes.into_iter().filter_map(|servers| servers.get(at).copied());
        let former = self.group.former.iter().filter(|(n, _)| *n == piece).map(|(_, server)| *server);
        for server in substitutes.chain(homes).chain(former) {
            if !places.contains(&server) {
                places.push(server);
            }
        }
        places
    }
}
