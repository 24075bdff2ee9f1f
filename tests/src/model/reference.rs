//! The reference: POSIX names and bytes in memory, in the most obvious way.

use std::collections::BTreeMap;

use super::ops::{Op, SLOTS};
use super::{Said, Value, digest};

/// Where every symlink points: to nothing, so that following one is an error of its own.
pub const NOWHERE: &str = "nowhere";

/// An in-memory file system.
#[derive(Debug)]
pub struct Reference {
    nodes: BTreeMap<u64, Node>,
    next: u64,
    open: [Option<u64>; SLOTS],
}

#[derive(Debug)]
struct Node {
    body: Body,
    mode: u32,
    links: u64,
    xattrs: BTreeMap<String, Vec<u8>>,
}

#[derive(Debug)]
enum Body {
    File(Vec<u8>),
    Folder(BTreeMap<String, u64>),
    Link(String),
}

const ROOT: u64 = 1;

impl Default for Reference {
    fn default() -> Reference {
        let mut reference = Reference { nodes: BTreeMap::new(), next: ROOT, open: [None; SLOTS] };
        reference.add(Body::Folder(BTreeMap::new()), 0o755);
        reference
    }
}

impl Reference {
    /// Does an operation.
    pub fn apply(&mut self, op: &Op) -> Said {
        match op {
            Op::Create { path, mode } => self.create(path, Body::File(vec![]), *mode),
            Op::Mkdir { path } => self.create(path, Body::Folder(BTreeMap::new()), 0o755),
            Op::Symlink { path } => self.create(path, Body::Link(NOWHERE.into()), 0o777),
            Op::Write { path, at, len, fill } => {
                let file = self.file(path)?;
                self.write(file, *at, *len, *fill)
            }
            Op::Append { path, len, fill } => {
                let file = self.file(path)?;
                let at = self.bytes(file).len() as u64;
                self.write(file, at, *len, *fill)
            }
            Op::Truncate { path, len } => {
                let file = self.file(path)?;
                self.bytes(file).resize(*len as usize, 0);
                Ok(Value::Done)
            }
            Op::Read { path } => {
                let file = self.file_to_read(path)?;
                Ok(Value::Bytes(self.bytes(file).clone()))
            }
            Op::Punch { path, at, len } => {
                let file = self.file(path)?;
                self.zero(file, *at, *len, true)
            }
            Op::ZeroRange { path, at, len } => {
                let file = self.file(path)?;
                self.zero(file, *at, *len, false)
            }
            Op::Allocate { path, at, len, keep } => {
                let file = self.file(path)?;
                let bytes = self.bytes(file);
                if !keep && bytes.len() < (at + len) as usize {
                    bytes.resize((at + len) as usize, 0);
                }
                Ok(Value::Done)
            }
            Op::Copy { from, at, to, to_at, len } => self.copy(from, *at, to, *to_at, *len),
            Op::Unlink { path } => self.unlink(path),
            Op::Rmdir { path } => self.rmdir(path),
            Op::Rename { from, to, flags } => self.rename(from, to, *flags),
            Op::Link { from, to } => self.link(from, to),
            Op::Readlink { path } => match &self.node(path)?.body {
                Body::Link(target) => Ok(Value::Text(target.clone())),
                _ => Err(libc::EINVAL),
            },
            Op::List { path } => self.list(path),
            Op::Stat { path } => self.stat(path),
            Op::Chmod { path, mode } => {
                let at = self.follow(path)?;
                self.nodes.get_mut(&at).expect("found").mode = *mode;
                Ok(Value::Done)
            }
            Op::SetXattr { path, name, value } => {
                let node = self.node_for_xattr(path)?;
                node.xattrs.insert(name.clone(), value.clone());
                Ok(Value::Done)
            }
            Op::GetXattr { path, name } => {
                let node = self.node_for_xattr(path)?;
                node.xattrs.get(name).map(|v| Value::Bytes(v.clone())).ok_or(libc::ENODATA)
            }
            Op::RemoveXattr { path, name } => {
                let node = self.node_for_xattr(path)?;
                node.xattrs.remove(name).map(|_| Value::Done).ok_or(libc::ENODATA)
            }
            Op::ListXattrs { path } => {
                let node = self.node_for_xattr(path)?;
                Ok(Value::Names(node.xattrs.keys().map(|k| (k.clone(), 'x')).collect()))
            }
            Op::Open { slot, path } => {
                let file = self.file(path)?;
                self.close(*slot);
                self.open[*slot] = Some(file);
                Ok(Value::Done)
            }
            Op::WriteOpen { slot, at, len, fill } => match self.open[*slot] {
                Some(file) => self.write(file, *at, *len, *fill),
                None => Err(libc::EBADF),
            },
            Op::ReadOpen { slot } => match self.open[*slot] {
                Some(file) => Ok(Value::Bytes(self.bytes(file).clone())),
                None => Err(libc::EBADF),
            },
            Op::TruncateOpen { slot, len } => match self.open[*slot] {
                Some(file) => {
                    self.bytes(file).resize(*len as usize, 0);
                    Ok(Value::Done)
                }
                None => Err(libc::EBADF),
            },
            Op::SyncOpen { slot } => self.open[*slot].map(|_| Value::Done).ok_or(libc::EBADF),
            Op::Close { slot } => {
                self.close(*slot);
                Ok(Value::Done)
            }
        }
    }

    /// Every path with its kind, as [`super::tree`] gives it.
    pub fn tree(&self) -> Vec<(String, String)> {
        fn walk(fs: &Reference, folder: u64, prefix: &str, out: &mut Vec<(String, String)>) {
            let Body::Folder(names) = &fs.nodes[&folder].body else { return };
            for (name, id) in names {
                let path = format!("{prefix}/{name}");
                let what = match &fs.nodes[id].body {
                    Body::Folder(_) => "folder".into(),
                    Body::Link(target) => format!("link to {target}"),
                    Body::File(bytes) => digest(bytes),
                };
                out.push((path.clone(), what));
                walk(fs, *id, &path, out);
            }
        }
        let mut out = vec![];
        walk(self, ROOT, "", &mut out);
        out.sort();
        out
    }

    fn add(&mut self, body: Body, mode: u32) -> u64 {
        let id = self.next;
        self.next += 1;
        self.nodes.insert(id, Node { body, mode, links: 1, xattrs: BTreeMap::new() });
        id
    }

    fn names(&mut self, folder: u64) -> &mut BTreeMap<String, u64> {
        match &mut self.nodes.get_mut(&folder).expect("a folder").body {
            Body::Folder(names) => names,
            _ => unreachable!("only called for folders"),
        }
    }

    fn bytes(&mut self, file: u64) -> &mut Vec<u8> {
        match &mut self.nodes.get_mut(&file).expect("a file").body {
            Body::File(bytes) => bytes,
            _ => unreachable!("only called for files"),
        }
    }

    /// The folder that holds the last name of a path, and that name.
    fn parent<'p>(&self, path: &'p str) -> Result<(u64, &'p str), i32> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut at = ROOT;
        for part in folder.split('/').filter(|p| !p.is_empty()) {
            at = match &self.nodes[&at].body {
                Body::Folder(names) => *names.get(part).ok_or(libc::ENOENT)?,
                Body::Link(_) => return Err(libc::ENOENT),
                Body::File(_) => return Err(libc::ENOTDIR),
            };
        }
        match self.nodes[&at].body {
            Body::Folder(_) => Ok((at, name)),
            Body::Link(_) => Err(libc::ENOENT),
            Body::File(_) => Err(libc::ENOTDIR),
        }
    }

    fn look(&self, folder: u64, name: &str) -> Option<u64> {
        match &self.nodes[&folder].body {
            Body::Folder(names) => names.get(name).copied(),
            _ => None,
        }
    }

    fn find(&self, path: &str) -> Result<u64, i32> {
        let (folder, name) = self.parent(path)?;
        self.look(folder, name).ok_or(libc::ENOENT)
    }

    fn node(&self, path: &str) -> Result<&Node, i32> {
        Ok(&self.nodes[&self.find(path)?])
    }

    /// User attributes are for files and folders only.
    fn node_for_xattr(&mut self, path: &str) -> Result<&mut Node, i32> {
        let id = self.follow(path)?;
        Ok(self.nodes.get_mut(&id).expect("found"))
    }

    /// Follows a symlink at the end, which leads nowhere.
    fn follow(&self, path: &str) -> Result<u64, i32> {
        let id = self.find(path)?;
        if matches!(self.nodes[&id].body, Body::Link(_)) { Err(libc::ENOENT) } else { Ok(id) }
    }

    /// A file to be written, opened without following links.
    fn file(&self, path: &str) -> Result<u64, i32> {
        let id = self.find(path)?;
        match self.nodes[&id].body {
            Body::File(_) => Ok(id),
            Body::Folder(_) => Err(libc::EISDIR),
            Body::Link(_) => Err(libc::ELOOP),
        }
    }

    /// A folder can be opened for reading but not read, which is the same errno.
    fn file_to_read(&self, path: &str) -> Result<u64, i32> {
        self.file(path)
    }

    fn create(&mut self, path: &str, body: Body, mode: u32) -> Said {
        let (folder, name) = self.parent(path)?;
        if self.look(folder, name).is_some() {
            return Err(libc::EEXIST);
        }
        let id = self.add(body, mode);
        self.names(folder).insert(name.into(), id);
        Ok(Value::Done)
    }

    fn write(&mut self, file: u64, at: u64, len: u64, fill: u8) -> Said {
        if len > 0 {
            let (at, end) = (at as usize, (at + len) as usize);
            let bytes = self.bytes(file);
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            bytes[at..end].fill(fill);
        }
        Ok(Value::Done)
    }

    fn zero(&mut self, file: u64, at: u64, len: u64, keep: bool) -> Said {
        let bytes = self.bytes(file);
        let end = (at + len) as usize;
        if !keep && bytes.len() < end {
            bytes.resize(end, 0);
        }
        let end = end.min(bytes.len());
        if (at as usize) < end {
            bytes[at as usize..end].fill(0);
        }
        Ok(Value::Done)
    }

    fn copy(&mut self, from: &str, at: u64, to: &str, to_at: u64, len: u64) -> Said {
        let (from, to) = (self.file(from)?, self.file(to)?);
        let have = self.bytes(from).len() as u64;
        let len = len.min(have.saturating_sub(at));
        if len == 0 {
            return Ok(Value::Count(0));
        }
        if from == to && at < to_at + len && to_at < at + len {
            return Err(libc::EINVAL);
        }
        let piece = self.bytes(from)[at as usize..(at + len) as usize].to_vec();
        let bytes = self.bytes(to);
        let end = (to_at + len) as usize;
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[to_at as usize..end].copy_from_slice(&piece);
        Ok(Value::Count(len))
    }

    fn unlink(&mut self, path: &str) -> Said {
        let (folder, name) = self.parent(path)?;
        let id = self.look(folder, name).ok_or(libc::ENOENT)?;
        if matches!(self.nodes[&id].body, Body::Folder(_)) {
            return Err(libc::EISDIR);
        }
        self.names(folder).remove(name);
        self.unname(id);
        Ok(Value::Done)
    }

    fn rmdir(&mut self, path: &str) -> Said {
        let (folder, name) = self.parent(path)?;
        let id = self.look(folder, name).ok_or(libc::ENOENT)?;
        match &self.nodes[&id].body {
            Body::Folder(names) if names.is_empty() => {}
            Body::Folder(_) => return Err(libc::ENOTEMPTY),
            _ => return Err(libc::ENOTDIR),
        }
        self.names(folder).remove(name);
        self.nodes.remove(&id);
        Ok(Value::Done)
    }

    fn rename(&mut self, from: &str, to: &str, flags: u32) -> Said {
        let (from_folder, from_name) = self.parent(from)?;
        let (to_folder, to_name) = self.parent(to)?;
        let exchange = flags == libc::RENAME_EXCHANGE;
        let source = self.look(from_folder, from_name).ok_or(libc::ENOENT)?;
        let target = self.look(to_folder, to_name);
        if flags == libc::RENAME_NOREPLACE && target.is_some() {
            return Err(libc::EEXIST);
        }
        if exchange && target.is_none() {
            return Err(libc::ENOENT);
        }
        // A folder may not go below itself; nor may one that holds the source be its target.
        if self.within(to_folder, source) {
            return Err(libc::EINVAL);
        }
        if let Some(target) = target
            && self.within(from_folder, target)
        {
            return Err(if exchange { libc::EINVAL } else { libc::ENOTEMPTY });
        }
        if let Some(target) = target {
            if target == source {
                return Ok(Value::Done);
            }
            if !exchange {
                let source_is = matches!(self.nodes[&source].body, Body::Folder(_));
                match &self.nodes[&target].body {
                    Body::Folder(_) if !source_is => return Err(libc::EISDIR),
                    Body::Folder(names) if !names.is_empty() => return Err(libc::ENOTEMPTY),
                    Body::Folder(_) => {
                        self.nodes.remove(&target);
                    }
                    _ if source_is => return Err(libc::ENOTDIR),
                    _ => self.unname(target),
                }
            }
        }
        self.names(from_folder).remove(from_name);
        if exchange && let Some(target) = target {
            self.names(from_folder).insert(from_name.into(), target);
        }
        self.names(to_folder).insert(to_name.into(), source);
        Ok(Value::Done)
    }

    /// Whether `folder` is `root` or lies below it.
    fn within(&self, folder: u64, root: u64) -> bool {
        if folder == root {
            return true;
        }
        match &self.nodes[&root].body {
            Body::Folder(names) => names.values().any(|id| self.within(folder, *id)),
            _ => false,
        }
    }

    fn link(&mut self, from: &str, to: &str) -> Said {
        let source = self.find(from)?;
        let (folder, name) = self.parent(to)?;
        if self.look(folder, name).is_some() {
            return Err(libc::EEXIST);
        }
        if matches!(self.nodes[&source].body, Body::Folder(_)) {
            return Err(libc::EPERM);
        }
        self.nodes.get_mut(&source).expect("found").links += 1;
        self.names(folder).insert(name.into(), source);
        Ok(Value::Done)
    }

    fn list(&self, path: &str) -> Said {
        let id = self.follow(path)?;
        let Body::Folder(names) = &self.nodes[&id].body else { return Err(libc::ENOTDIR) };
        let kind = |id: &u64| match self.nodes[id].body {
            Body::File(_) => 'f',
            Body::Folder(_) => 'd',
            Body::Link(_) => 'l',
        };
        Ok(Value::Names(names.iter().map(|(n, id)| (n.clone(), kind(id))).collect()))
    }

    fn stat(&self, path: &str) -> Said {
        let node = self.node(path)?;
        let (kind, size, links) = match &node.body {
            Body::File(bytes) => ('f', bytes.len() as u64, node.links),
            Body::Folder(_) => ('d', 0, 0),
            Body::Link(target) => ('l', target.len() as u64, node.links),
        };
        Ok(Value::Stat { kind, size, links, mode: node.mode })
    }

    fn unname(&mut self, id: u64) {
        let node = self.nodes.get_mut(&id).expect("named");
        node.links -= 1;
        if node.links == 0 && !self.open.contains(&Some(id)) {
            self.nodes.remove(&id);
        }
    }

    fn close(&mut self, slot: usize) {
        if let Some(id) = self.open[slot].take()
            && self.nodes[&id].links == 0
            && !self.open.contains(&Some(id))
        {
            self.nodes.remove(&id);
        }
    }
}
