//! Attributes: getattr, setattr (the length among them), readlink, statfs.
//!
//! A truncation is a change of content: what was written before it is committed first, what lies beyond the new end is
//! not worth committing, and it takes its turn among the commits of the file.

use bytes::Bytes;
use torchfs_proto::attr::{SIZE_MAX, SetAttr};
use torchfs_proto::extent::RangeOp;
use torchfs_proto::msg::meta::{Done, Op, VolumeUse, lease};
use torchfs_proto::{Code, Fault, Ino, Result};

use crate::node::{Changing, Inode};
use crate::{Fh, Node, Vfs};

impl Vfs {
    /// Attributes.
    pub async fn getattr(&self, ino: Ino, _fh: Option<Fh>) -> Result<Node> {
        let node = self.node(ino);
        let known = {
            let state = node.lock();
            state.find_attr(&self.0.meta).map(|(attr, _)| self.answer(&state, attr))
        };
        let answer = match known {
            Some(answer) => answer,
            None => self.ask_attr(&node).await?,
        };
        self.before_told(&node, &answer).await;
        Ok(answer)
    }

    async fn ask_attr(&self, node: &Inode) -> Result<Node> {
        let ino = node.ino;
        let asked = self.asked();
        let changes = node.lock().changes;
        let done = self.0.meta.ask(Op::GetAttr { ino }).await?;
        let Done::Attr(attr) = done else { return Err(unexpected("getattr", &done)) };
        let mut state = node.lock();
        let current = self.is_current(asked, ino) && state.changes == changes;
        state.learn(&self.0.meta, attr.clone(), current);
        Ok(self.answer(&state, attr))
    }

    /// Changes attributes, the length among them.
    pub async fn setattr(&self, ino: Ino, fh: Option<Fh>, set: SetAttr) -> Result<Node> {
        if set.size.is_some_and(|size| size > SIZE_MAX) {
            return Err(Code::TooLarge.into());
        }
        let node = self.node(ino);
        let handle = fh.and_then(|fh| self.handle(fh).ok());
        if let (Some(handle), Some(_)) = (&handle, set.size) {
            handle.wrote();
        }
        // Writes that follow wait for this, so that it does not overtake them if the caller goes away.
        let changing = Changing::begin(&node).await;
        let (vfs, changed) = (self.clone(), node.clone());
        let changing = async move {
            let (_changing, node) = (changing, changed);
            if let Some(size) = set.size {
                vfs.cut_overlay(&node, size..u64::MAX);
            }
            // Times and rights that were set must not be overtaken by those of earlier writes.
            let seen = node.lock().file.as_ref().map_or(0, |file| file.errors);
            let _turn = vfs.quiet_turn(&node).await;
            if set.size.is_some()
                && let Some(file) = &node.lock().file
            {
                file.check(seen)?;
            }
            let asked = vfs.asked();
            let changed = vfs.0.meta.change(Op::SetAttr { ino, set: set.clone() }).await?;
            let Done::Attr(attr) = changed.done else { return Err(unexpected("setattr", &changed.done)) };
            let meta = &vfs.0.meta;
            let mut state = node.lock();
            state.changed_at(changed.seq);
            state.xattrs = if set.kill_privileges || set.uid.is_some() || set.gid.is_some() {
                None
            } else {
                state.xattrs.take()
            };
            if let Some(size) = set.size {
                let protected =
                    vfs.is_current(asked, ino) && vfs.holds_any(ino, &[lease::WRITE, lease::READ]);
                let epoch = meta.lease_epoch();
                let file = state.file();
                file.applied(
                    &[RangeOp::Truncate { size }],
                    &attr,
                    epoch,
                    protected,
                    vfs.0.config.extents_max,
                );
                // What the kernel keeps of the last page is zeros from here on.
                file.told = size;
            }
            state.learn(meta, attr.clone(), vfs.is_current(asked, ino));
            Ok(vfs.answer(&state, attr))
        };
        let answer = self.finish(changing).await?;
        self.before_told(&node, &answer).await;
        Ok(answer)
    }

    /// The target of a symlink.
    pub async fn readlink(&self, ino: Ino) -> Result<Bytes> {
        let node = self.node(ino);
        {
            let state = node.lock();
            if let Some(target) = state.target.as_ref()
                && self.0.meta.holds(ino, lease::ATTR).is_some()
            {
                return Ok(target.clone());
            }
        }
        let asked = self.asked();
        let done = self.0.meta.ask(Op::ReadLink { ino }).await?;
        let Done::Target(target) = done else { return Err(unexpected("readlink", &done)) };
        let target = Bytes::from(Vec::from(target));
        if self.is_current(asked, ino) {
            node.lock().target = Some(target.clone());
        }
        Ok(target)
    }

    /// Figures of the volume.
    pub async fn statfs(&self) -> Result<VolumeUse> {
        match self.0.meta.ask(Op::StatFs).await? {
            Done::Use(figures) => {
                // What is buffered here is as good as stored.
                let buffered = self.0.budget.used();
                Ok(VolumeUse { free: figures.free.saturating_sub(buffered), ..figures })
            }
            done => Err(unexpected("statfs", &done)),
        }
    }
}

/// What a service answers that speaks another language.
pub(crate) fn unexpected(op: &str, done: &Done) -> Fault {
    let name = format!("{done:?}");
    let name = name.split(['(', ' ', '{']).next().unwrap_or_default();
    Fault::new(Code::Protocol, format!("the metadata service answered {op} with {name}"))
}
