//! Policies: how new content of a file is stored, or of everything made in a folder; shown as extended attributes.
//!
//! - `torchfs.redundancy`, `torchfs.stripe`: what holds here. Set by the owner and root; empty means what the volume says.
//! - `torchfs.asked`: the redundancy that was asked for; there may be too few servers for it yet.
//! - `torchfs.policy`: both at once, as they were set here or inherited; empty where nothing differs from the volume.
//! - `torchfs.restripe`: how many bytes of a file are stored otherwise than its policy says. Setting it to a number writes about so
//!   many of them again (`restripe.rs`).
//!
//! These names are in no listing, so that copies of a file do not carry them along.

use bytes::Bytes;
use torchfs_client::Changed;
use torchfs_proto::attr::Kind;
use torchfs_proto::layout::{Layout, Scheme};
use torchfs_proto::msg::meta::{Done, Op, Policy};
use torchfs_proto::{Code, Fault, Ino, LayoutId, Result};

use crate::node::Inode;
use crate::{Caller, Vfs};

const PREFIX: &[u8] = b"torchfs.";
const REDUNDANCY: &[u8] = b"torchfs.redundancy";
const STRIPE: &[u8] = b"torchfs.stripe";
const ASKED: &[u8] = b"torchfs.asked";
const POLICY: &[u8] = b"torchfs.policy";
const RESTRIPE: &[u8] = b"torchfs.restripe";

/// Whether an extended attribute of this name is a policy and not stored as such.
pub(crate) fn is_policy(name: &[u8]) -> bool {
    name.starts_with(PREFIX)
}

impl Vfs {
    /// A policy as text.
    pub(crate) async fn policy(&self, ino: Ino, name: &[u8]) -> Result<Bytes> {
        let attr = self.getattr(ino, None).await?.attr;
        let node = self.node(ino);
        let layout = self.layout(self.layout_of(&node)).await?;
        let asked = layout.asked.unwrap_or(layout.scheme);
        match name {
            REDUNDANCY => Ok(layout.scheme.to_string().into()),
            STRIPE => Ok(layout.groups.len().to_string().into()),
            ASKED => Ok(asked.to_string().into()),
            POLICY if attr.layout.is_none() => Ok(Bytes::new()),
            POLICY => Ok(format!("{asked} {}", layout.groups.len()).into()),
            RESTRIPE if attr.kind == Kind::File => Ok(self.otherwise(&node).await?.to_string().into()),
            RESTRIPE => Ok("0".into()),
            _ => Err(Code::NoAttr.into()),
        }
    }

    /// Sets a policy, or has a file written again by the one it has.
    pub(crate) async fn set_policy(&self, caller: Caller, ino: Ino, name: &[u8], value: &[u8]) -> Result<()> {
        let attr = self.getattr(ino, None).await?.attr;
        if caller.uid != 0 && caller.uid != attr.uid {
            return Err(Fault::new(
                Code::Permission,
                format!("only the owner of inode {ino} and root may do this"),
            ));
        }
        let text = std::str::from_utf8(value).map_err(|_| Fault::from(Code::Invalid))?.trim();
        let known = match attr.layout {
            Some(id) => Some(self.layout(id).await?),
            None => None,
        };
        let volume = self.layout(self.0.meta.info().volume.layout).await?;
        let mut policy = Policy {
            scheme: known.as_ref().map(|layout| layout.asked.unwrap_or(layout.scheme)),
            stripe: known
                .map(|layout| layout.groups.len())
                .filter(|n| *n != volume.groups.len())
                .map(|n| n as u32),
        };
        match name {
            REDUNDANCY if text.is_empty() => policy.scheme = None,
            REDUNDANCY => policy.scheme = Some(text.parse::<Scheme>()?),
            STRIPE if text.is_empty() => policy.stripe = None,
            STRIPE => policy.stripe = Some(text.parse().map_err(|_| stripe_fault(text))?),
            POLICY => policy = parse(text, volume.groups.len())?,
            RESTRIPE if attr.kind == Kind::File => {
                let bytes = text.parse().map_err(|_| {
                    Fault::new(Code::Invalid, format!("`{text}` is no number of bytes"))
                        .next("write how many bytes are to be written again at most")
                })?;
                return self.restripe(ino, bytes).await;
            }
            RESTRIPE => return Err(Fault::new(Code::IsDir, "only the content of files is written again")),
            _ => return Err(Fault::new(Code::Unsupported, "there is no such policy")),
        }
        let (vfs, node) = (self.clone(), self.node(ino));
        self.finish(async move {
            let asked = vfs.asked();
            let Changed { done, seq } = vfs.0.meta.change(Op::SetPolicy { ino, policy }).await?;
            {
                let mut state = node.lock();
                state.changed_at(seq);
                match done {
                    Done::Attr(attr) => state.learn(&vfs.0.meta, attr, vfs.is_current(asked, ino)),
                    _ => state.doubt_attr(),
                }
            }
            // It may be the first of its kind: its layout is in a newer placement then.
            vfs.layout(vfs.layout_of(&node)).await.map(|_| ())
        })
        .await
    }

    /// The layout chosen for new blocks of a file.
    pub(crate) fn layout_of(&self, node: &Inode) -> LayoutId {
        let own = node.lock().attr.as_ref().and_then(|attr| attr.layout);
        own.unwrap_or_else(|| self.0.meta.info().volume.layout)
    }

    /// The layout that is in use where this one was chosen.
    pub(crate) async fn layout(&self, id: LayoutId) -> Result<Layout> {
        let mut placement = self.0.meta.placement();
        if placement.current(id).is_none() {
            placement = self.0.meta.fetch_placement().await?;
        }
        let unknown = || match id.0 {
            0 => {
                Fault::new(Code::Unreachable, "too few data servers have joined for the volume's redundancy")
                    .next("`torchfs status` says how many it needs")
            }
            _ => Fault::new(Code::Invalid, format!("layout {id} is not in the placement")),
        };
        placement.current(id).cloned().ok_or_else(unknown)
    }
}

/// Both parts of a policy, as [`POLICY`] shows them.
fn parse(text: &str, usual: usize) -> Result<Policy> {
    let Some((scheme, stripe)) = text.split_once(' ') else {
        return match text {
            "" => Ok(Policy::default()),
            text => Err(Fault::new(Code::Invalid, format!("`{text}` is no policy"))
                .next("write a redundancy and a number of groups, or nothing")),
        };
    };
    let stripe: u32 = stripe.parse().map_err(|_| stripe_fault(stripe))?;
    Ok(Policy { scheme: Some(scheme.parse()?), stripe: Some(stripe).filter(|n| *n as usize != usual) })
}

fn stripe_fault(text: &str) -> Fault {
    Fault::new(Code::Invalid, format!("`{text}` is no number of groups")).next("write a number from 1 to 512")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_read_as_it_is_shown() {
        assert_eq!(parse("", 64), Ok(Policy::default()));
        let ec = Some(Scheme::Ec { data: 4, parity: 2 });
        assert_eq!(parse("ec:4+2 64", 64), Ok(Policy { scheme: ec, stripe: None }));
        assert_eq!(parse("ec:4+2 8", 64), Ok(Policy { scheme: ec, stripe: Some(8) }));
        assert!(parse("ec:4+2", 64).is_err() && parse("much 8", 64).is_err());
    }
}
