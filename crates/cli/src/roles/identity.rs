//! Who a data server is: the `server.toml` beside the segments in each of its folders.
//!
//! Each folder is a disk of its own and names the server it belongs to: the number that the server drew for itself, the cluster
//! and server number it was given when it first joined, and the number of this disk. So a server is recognised under any
//! address, its disks are recognised together, and a disk of one server is never mixed into another.
//!
//! Each also lists all disks of the server. So a disk that is missing has a name, and a folder that is empty because its
//! disk is not mounted is not taken for a new disk: that would fill the file system below.
//!
//! # Invariants
//! - A folder that has an identity keeps it; one that has none gets one before its first piece.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use torchfs_block::server::DiskName;

const FILE: &str = "server.toml";

/// A data server with all its disks.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Drawn by the server when it was made.
    pub store: u64,
    /// Its cluster; 0 before it joined.
    pub cluster: u64,
    /// Its number there.
    pub server: u32,
    /// Every disk: the folders that were given, and those that were there before.
    disks: Vec<Known>,
}

/// A disk as every folder lists it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Known {
    id: u64,
    path: PathBuf,
    /// It was on another file system than `/`.
    apart: bool,
    /// Why it cannot be used; never written.
    lost: Option<String>,
}

impl Identity {
    /// Reads what the folders say; makes those that are missing. A folder that cannot be read is a lost disk, unless all are.
    pub fn load(dirs: &[PathBuf]) -> anyhow::Result<Identity> {
        let mut found = Vec::new();
        let mut first_error = None;
        for dir in dirs {
            match Written::load(dir) {
                Ok(written) => found.push((dir.clone(), Ok(written))),
                Err(error) if error.downcast_ref::<io::Error>().is_some() => {
                    found.push((dir.clone(), Err(format!("{error:#}"))));
                    first_error.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(error) = first_error.filter(|_| found.iter().all(|(_, read)| read.is_err())) {
            return Err(error);
        }
        let known = found.iter().find_map(|(dir, read)| Some((dir, read.as_ref().ok()?.clone()?)));
        let mut identity = match known {
            None => {
                let store = rand::random::<u64>() >> 1;
                Identity { store, cluster: 0, server: 0, disks: Vec::new() }
            }
            Some((dir, first)) => {
                for (other, read) in &found {
                    if let Ok(Some(written)) = read {
                        same_server((dir, &first), (other, written))?;
                    }
                }
                let Written { store, cluster, server, disks, .. } = first;
                Identity { store, cluster, server, disks }
            }
        };
        let before = std::mem::take(&mut identity.disks);
        for (dir, read) in found {
            identity.disks.push(recognise(dir, read, &before)?);
        }
        match identity.lost().into_iter().next() {
            Some((_, why)) if identity.usable().is_empty() => {
                bail!("{why}; choose another --dir, or repair it")
            }
            _ => Ok(identity),
        }
    }

    /// The disks that can be used.
    pub fn usable(&self) -> Vec<DiskName> {
        self.disks.iter().filter(|disk| disk.lost.is_none()).map(Known::name).collect()
    }

    /// The disks that cannot be used, and why.
    pub fn lost(&self) -> Vec<(DiskName, String)> {
        self.disks.iter().filter_map(|disk| Some((disk.name(), disk.lost.clone()?))).collect()
    }

    /// Writes it into every folder that can be used; durable before the first piece is.
    pub fn store(&self) -> anyhow::Result<()> {
        for disk in self.disks.iter().filter(|disk| disk.lost.is_none()) {
            self.store_in(disk)?;
        }
        Ok(())
    }

    /// Takes the folder of a lost disk for a new disk, if an empty one was put in its place; its name then.
    pub fn replace(&mut self, path: &str) -> anyhow::Result<Option<DiskName>> {
        let Some(at) = self.disks.iter().position(|disk| disk.path == Path::new(path)) else {
            return Ok(None);
        };
        let dir = &self.disks[at].path;
        let empty = match fs::read_dir(dir) {
            // What a fresh file system may have.
            Ok(mut entries) => {
                entries.all(|e| e.is_ok_and(|e| e.file_name() == "lost+found" || e.file_name() == "LOCK"))
            }
            Err(_) => false,
        };
        if !empty || is_apart(dir)? != self.disks[at].apart {
            return Ok(None);
        }
        let disk = Known { id: draw(), lost: None, ..self.disks[at].clone() };
        self.disks[at] = disk;
        self.store()?;
        Ok(Some(self.disks[at].name()))
    }

    fn store_in(&self, disk: &Known) -> anyhow::Result<()> {
        let mut text = format!(
            "# Who this data server is; made by torchfs data.\nversion = 1\nstore = \"{:x}\"\ncluster = \"{:x}\"\n\
             server = {}\ndisk = \"{:x}\"\n",
            self.store, self.cluster, self.server, disk.id
        );
        for Known { id, path, apart, .. } in &self.disks {
            let path = toml::Value::String(path.display().to_string());
            text += &format!("\n[[disks]]\nid = \"{id:x}\"\npath = {path}\napart = {apart}\n");
        }
        let dir = &disk.path;
        let (path, fresh) = (dir.join(FILE), dir.join("server.toml.new"));
        if fs::read_to_string(&path).is_ok_and(|old| old == text) {
            return Ok(());
        }
        let write = || -> io::Result<()> {
            let mut file = torchfs_disk::create_private(&fresh)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&fresh, &path)?;
            File::open(dir)?.sync_all()
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Known {
    fn name(&self) -> DiskName {
        DiskName { id: self.id, path: self.path.display().to_string() }
    }
}

/// The disk in a folder.
fn recognise(
    path: PathBuf,
    read: Result<Option<Written>, String>,
    before: &[Known],
) -> anyhow::Result<Known> {
    let known = before.iter().find(|disk| disk.path == path);
    let lost = |why: String| {
        let id = known.map_or_else(draw, |disk| disk.id);
        Known { id, path: path.clone(), apart: known.is_some_and(|disk| disk.apart), lost: Some(why) }
    };
    match read {
        Err(why) => Ok(lost(why)),
        Ok(Some(written)) => {
            let apart = is_apart(&path)?;
            Ok(Known { id: written.disk, path, apart, lost: None })
        }
        Ok(None) => {
            let apart = is_apart(&path)?;
            if known.is_some_and(|disk| disk.apart) && !apart {
                return Ok(lost(format!(
                    "{} is empty and on the root file system: its disk is not mounted",
                    path.display()
                )));
            }
            if let Err(error) = torchfs_disk::make_dir_durably(&path) {
                return Ok(lost(format!("cannot make {}: {error}", path.display())));
            }
            Ok(Known { id: draw(), path, apart, lost: None })
        }
    }
}

/// Whether a folder, or where it would be made, is on another file system than `/`.
fn is_apart(dir: &Path) -> anyhow::Result<bool> {
    let root = fs::metadata("/").context("cannot look at /")?.dev();
    let dir = std::path::absolute(dir).with_context(|| format!("{} is no path", dir.display()))?;
    for dir in dir.ancestors() {
        match fs::metadata(dir) {
            Ok(found) => return Ok(found.dev() != root),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("cannot look at {}", dir.display())),
        }
    }
    Ok(false)
}

fn draw() -> u64 {
    rand::random::<u64>() >> 1
}

fn same_server(one: (&PathBuf, &Written), other: (&PathBuf, &Written)) -> anyhow::Result<()> {
    if (one.1.store, one.1.cluster) == (other.1.store, other.1.cluster) {
        if one.1.disk == other.1.disk && one.0 != other.0 {
            bail!(
                "{} and {} are copies of one disk; keep one of them, and give an empty folder for the other",
                one.0.display(),
                other.0.display()
            );
        }
        return Ok(());
    }
    bail!(
        "{} belongs to data server {} of cluster {:x} and {} to data server {} of cluster {:x}; \
         start one `torchfs data` for each, or give empty folders",
        one.0.display(),
        one.1.server,
        one.1.cluster,
        other.0.display(),
        other.1.server,
        other.1.cluster
    )
}

/// What one `server.toml` says.
#[derive(Clone, Debug)]
struct Written {
    store: u64,
    cluster: u64,
    server: u32,
    disk: u64,
    disks: Vec<Known>,
}

impl Written {
    /// None if the folder has none. An error of the disk is an `io::Error`.
    fn load(dir: &Path) -> anyhow::Result<Option<Written>> {
        let path = dir.join(FILE);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let table: toml::Table = text.parse().with_context(|| {
            format!("{} is damaged; put back a copy, or start with an empty --dir", path.display())
        })?;
        let hex = |table: &toml::Table, key: &str| {
            let text = table.get(key).and_then(|v| v.as_str()).unwrap_or_default();
            u64::from_str_radix(text, 16).with_context(|| format!("{} has no `{key}`", path.display()))
        };
        let server =
            table.get("server").and_then(toml::Value::as_integer).and_then(|n| u32::try_from(n).ok());
        let server = server.with_context(|| format!("{} has no `server`", path.display()))?;
        let store = hex(&table, "store")?;
        // A folder from before servers had several.
        let disk = if table.contains_key("disk") { hex(&table, "disk")? } else { store };
        let mut disks = Vec::new();
        for known in table.get("disks").and_then(|v| v.as_array()).into_iter().flatten() {
            let Some(known) = known.as_table() else { continue };
            let text = known.get("path").and_then(|v| v.as_str()).unwrap_or_default();
            let apart = known.get("apart").and_then(|v| v.as_bool()).unwrap_or_default();
            disks.push(Known { id: hex(known, "id")?, path: text.into(), apart, lost: None });
        }
        Ok(Some(Written { store, cluster: hex(&table, "cluster")?, server, disk, disks }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(identity: &Identity) -> Vec<u64> {
        identity.usable().iter().map(|disk| disk.id).collect()
    }

    #[test]
    fn folders_are_recognised_together_and_an_empty_one_joins() {
        let root = tempfile::tempdir().expect("a folder");
        let dirs: Vec<PathBuf> = ["a", "b", "c"].iter().map(|name| root.path().join(name)).collect();
        let mut first = Identity::load(&dirs[..2]).expect("fresh folders are fine");
        assert_eq!((first.cluster, first.usable().len()), (0, 2));
        (first.cluster, first.server) = (9, 3);
        first.store().expect("stored");

        let again = Identity::load(&[dirs[1].clone(), dirs[0].clone()]).expect("the order does not matter");
        assert_eq!((again.store, again.cluster, again.server), (first.store, 9, 3));
        assert_eq!(names(&again).iter().rev().copied().collect::<Vec<_>>(), names(&first));

        let more = Identity::load(&dirs).expect("a third folder joins");
        assert_eq!(more.store, first.store);
        assert_eq!(names(&more)[..2], names(&first));
        assert!(!names(&first).contains(&names(&more)[2]));

        // A replaced disk: the folder is empty again and gets a new number.
        fs::remove_dir_all(&dirs[1]).expect("removed");
        let replaced = Identity::load(&dirs[..2]).expect("an empty folder joins");
        assert_eq!(names(&replaced)[0], names(&first)[0]);
        assert_ne!(names(&replaced)[1], names(&first)[1]);
    }

    #[test]
    fn folders_of_two_servers_are_refused_together() {
        let root = tempfile::tempdir().expect("a folder");
        for (name, server) in [("a", 1), ("b", 2)] {
            let mut identity = Identity::load(&[root.path().join(name)]).expect("fresh");
            (identity.cluster, identity.server) = (9, server);
            identity.store().expect("stored");
        }
        let both = Identity::load(&[root.path().join("a"), root.path().join("b")]);
        let words = both.expect_err("two servers").to_string();
        assert!(words.contains("data server 1") && words.contains("data server 2"), "{words}");
    }

    #[test]
    fn an_empty_folder_whose_disk_is_not_mounted_is_not_a_new_disk() {
        let root = tempfile::tempdir().expect("a folder");
        let dirs: Vec<PathBuf> = ["a", "b"].iter().map(|name| root.path().join(name)).collect();
        let mut first = Identity::load(&dirs).expect("fresh");
        first.cluster = 9;
        // As if the second had been a disk of its own.
        first.disks[1].apart = true;
        let here = is_apart(&dirs[0]).expect("known");
        first.store().expect("stored");
        fs::remove_dir_all(&dirs[1]).expect("removed");
        let again = Identity::load(&dirs).expect("the other disk is there");
        if here {
            // The tests' folder is itself on another file system than /.
            assert_eq!(again.usable().len(), 2);
            return;
        }
        assert_eq!(again.usable().len(), 1);
        let (name, why) = &again.lost()[0];
        assert_eq!(name.id, first.disks[1].id, "its pieces are missed under its own name");
        assert!(why.contains("not mounted"), "{why}");
    }

    #[test]
    fn a_folder_from_before_servers_had_several_is_one_disk() {
        let root = tempfile::tempdir().expect("a folder");
        let text = "version = 1\nstore = \"5a\"\ncluster = \"9\"\nserver = 4\n";
        fs::write(root.path().join(FILE), text).expect("written");
        let identity = Identity::load(&[root.path().to_path_buf()]).expect("understood");
        assert_eq!((identity.store, identity.server, names(&identity)), (0x5a, 4, vec![0x5a]));
    }
}
