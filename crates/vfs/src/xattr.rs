//! Extended attributes: all of an inode's are fetched at once and kept under the lease on its attributes. Most inodes have
//! none, which their attributes say, so that the kernel's question before each write costs nothing.
//!
//! POSIX ACLs are refused: permissions are mode, owner and group. So is all else that begins neither with `user.` nor with
//! `trusted.` nor with `security.`: the kernel leaves who may touch `system.` to the file system.

use std::sync::Arc;

use bytes::Bytes;
use torchfs_client::Changed;
use torchfs_proto::attr::{NAME_MAX, Raw, XATTR_MAX, flags};
use torchfs_proto::msg::meta::{Done, Op, lease};
use torchfs_proto::{Code, Fault, Ino, Result};

use crate::policy::is_policy;
use crate::{Caller, Vfs, unexpected};

/// Those that the kernel asks for rights before it comes to us.
const PREFIXES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];

impl Vfs {
    /// One extended attribute.
    pub async fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Bytes> {
        check(name)?;
        if is_policy(name) {
            return self.policy(ino, name).await;
        }
        let all = self.xattrs(ino).await?;
        match all.iter().find(|(have, _)| have[..] == *name) {
            Some((_, value)) => Ok(Bytes::copy_from_slice(value)),
            None => Err(Code::NoAttr.into()),
        }
    }

    /// Names of extended attributes.
    pub async fn listxattr(&self, ino: Ino) -> Result<Vec<Bytes>> {
        let all = self.xattrs(ino).await?;
        Ok(all.iter().map(|(name, _)| Bytes::copy_from_slice(name)).collect())
    }

    /// Sets an extended attribute; XATTR_CREATE 1, XATTR_REPLACE 2.
    pub async fn setxattr(
        &self,
        caller: Caller,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: u32,
    ) -> Result<()> {
        check(name)?;
        if is_policy(name) {
            return self.set_policy(caller, ino, name, value).await;
        }
        if value.len() > XATTR_MAX {
            return Err(Fault::new(
                Code::NoSpace,
                format!("an extended attribute has at most {XATTR_MAX} bytes"),
            ));
        }
        let (name, value) = (name.to_vec().into(), value.to_vec().into());
        self.change_xattrs(ino, Op::SetXattr { ino, name, value, flags }).await
    }

    /// Removes an extended attribute.
    pub async fn removexattr(&self, caller: Caller, ino: Ino, name: &[u8]) -> Result<()> {
        check(name)?;
        if is_policy(name) {
            return self.set_policy(caller, ino, name, b"").await;
        }
        self.change_xattrs(ino, Op::RemoveXattr { ino, name: name.to_vec().into() }).await
    }

    async fn xattrs(&self, ino: Ino) -> Result<Arc<Vec<(Raw, Raw)>>> {
        let node = self.node(ino);
        let mark = {
            let state = node.lock();
            if let Some((attr, _)) = state.find_attr(&self.0.meta) {
                if attr.flags & flags::XATTRS == 0 {
                    return Ok(Arc::default());
                }
                if let Some(all) = &state.xattrs {
                    return Ok(all.clone());
                }
            }
            state.mark
        };
        let asked = self.asked();
        let done = self.0.meta.ask(Op::Xattrs { ino }).await?;
        let Done::Xattrs(all) = done else { return Err(unexpected("xattrs", &done)) };
        let all = Arc::new(all);
        let mut state = node.lock();
        // A change of our own that was answered meanwhile may be newer than this.
        if self.is_current(asked, ino) && state.mark == mark && self.0.meta.holds(ino, lease::ATTR).is_some()
        {
            state.xattrs = Some(all.clone());
        }
        Ok(all)
    }

    async fn change_xattrs(&self, ino: Ino, op: Op) -> Result<()> {
        let (vfs, node) = (self.clone(), self.node(ino));
        self.finish(async move {
            let asked = vfs.asked();
            let changed = vfs.0.meta.change(op).await;
            let mut state = node.lock();
            state.xattrs = None;
            let Changed { done, seq } = changed?;
            state.changed_at(seq);
            match done {
                Done::Attr(attr) => state.learn(&vfs.0.meta, attr, vfs.is_current(asked, ino)),
                _ => state.doubt_attr(),
            }
            Ok(())
        })
        .await
    }
}

fn check(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Code::Range.into());
    }
    let kept = |prefix: &&[u8]| name.starts_with(prefix) && name.len() > prefix.len();
    match is_policy(name) || PREFIXES.iter().any(kept) {
        true => Ok(()),
        false => Err(Fault::new(Code::Unsupported, "extended attributes of this kind are not kept")),
    }
}
