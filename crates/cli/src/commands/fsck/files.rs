//! The files that are hurt when blocks lack pieces, by path.
//!
//! Blocks do not know their files, so all extents are gone through once, in pages; it is done only when a block lacks something. Paths
//! are put together from the folders upwards, for many files at a time, so a folder is listed once for all of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::json;
use torchfs_client::Tool;
use torchfs_proto::attr::Raw;
use torchfs_proto::{Code, Ino, VolumeId};

use super::report::{self, Report, SHOWN};
use crate::print;

/// Extents or names in one answer.
const PAGE: u32 = 4_096;
/// Files that are named together.
const BATCH: usize = 4_096;
/// Folders that are remembered.
const FOLDERS_MAX: usize = 65_536;
/// Folders above one another; more than that is a loop in a broken store.
const DEPTH_MAX: usize = 2_048;

/// What was found about files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Files {
    /// With blocks that cannot be read.
    pub unreadable: u64,
    /// With blocks that lack pieces, all of which can be read.
    pub degraded: u64,
}

/// A file with blocks that lack pieces.
struct File {
    volume: VolumeId,
    ino: Ino,
    parent: Ino,
    named: bool,
    unreadable: u64,
    degraded: u64,
}

/// Names the files of the blocks that lack pieces.
pub async fn name_files(tool: &Tool, report: &mut Report, blocks: u64, json: bool) -> anyhow::Result<Files> {
    let mut sink =
        Sink { names: Folders::new(tool), json, waiting: Vec::new(), count: Files::default(), told: 0 };
    if json {
        print!("\n  \"files\": [");
    }
    if !report.hurt.is_empty() {
        let bar = report.begin("files", blocks);
        let mut last: Option<File> = None;
        let mut cursor = Raw::from(Vec::new());
        loop {
            let (files, next) = tool.list_files(cursor, PAGE).await?;
            for file in files {
                bar.inc(file.blocks.len() as u64);
                // A file may go on in the next answer.
                let same = last.as_ref().is_some_and(|f| (f.volume, f.ino) == (file.volume, file.ino));
                if !same {
                    sink.take(last.take()).await?;
                }
                let entry = last.get_or_insert(File {
                    volume: file.volume,
                    ino: file.ino,
                    parent: file.parent,
                    named: file.named,
                    unreadable: 0,
                    degraded: 0,
                });
                for unreadable in file.blocks.iter().filter_map(|block| report.hurt.find(*block)) {
                    match unreadable {
                        true => entry.unreadable += 1,
                        false => entry.degraded += 1,
                    }
                }
            }
            if next.is_empty() {
                break;
            }
            cursor = next;
        }
        bar.finish_and_clear();
        sink.take(last).await?;
        sink.end().await?;
    }
    if json {
        print!("{}],", if sink.told > 0 { "\n  " } else { "" });
    }
    Ok(sink.count)
}

/// Takes files in and tells of them.
struct Sink<'a> {
    names: Folders<'a>,
    json: bool,
    /// Not told yet.
    waiting: Vec<File>,
    count: Files,
    told: u64,
}

impl Sink<'_> {
    async fn take(&mut self, file: Option<File>) -> anyhow::Result<()> {
        let Some(file) = file.filter(|file| file.unreadable + file.degraded > 0) else { return Ok(()) };
        let count = match file.unreadable {
            0 => &mut self.count.degraded,
            _ => &mut self.count.unreadable,
        };
        *count += 1;
        if self.json || *count <= SHOWN as u64 {
            self.waiting.push(file);
        }
        if self.json && self.waiting.len() >= BATCH { self.tell_json().await } else { Ok(()) }
    }

    async fn tell_json(&mut self) -> anyhow::Result<()> {
        let files = std::mem::take(&mut self.waiting);
        let places = self.names.paths(&files).await?;
        for (file, (volume, path)) in files.iter().zip(places) {
            let said = json!({
                "volume": volume,
                "path": path,
                "inode": file.ino.0,
                "blocks_unreadable": file.unreadable,
                "blocks_degraded": file.degraded,
            });
            print!("{}\n    {said}", if self.told > 0 { "," } else { "" });
            self.told += 1;
        }
        Ok(())
    }

    async fn end(&mut self) -> anyhow::Result<()> {
        if self.json {
            return self.tell_json().await;
        }
        let files = std::mem::take(&mut self.waiting);
        let places = self.names.paths(&files).await?;
        for unreadable in [true, false] {
            let these = files.iter().zip(&places).filter(|(file, _)| (file.unreadable > 0) == unreadable);
            for (at, (file, (volume, path))) in these.enumerate() {
                let (what, count) = match unreadable {
                    true => ("files that cannot be read as a whole:", file.unreadable),
                    false => {
                        ("files that can be read, with less redundancy than they should have:", file.degraded)
                    }
                };
                if at == 0 {
                    println!("{what}");
                }
                let blocks = if count == 1 { "block" } else { "blocks" };
                match path {
                    Some(path) => println!("  {volume}:{} ({} {blocks})", clean(path), print::count(count)),
                    None => println!(
                        "  {volume}: inode {}, whose name was not found ({} {blocks})",
                        file.ino,
                        print::count(count)
                    ),
                }
            }
            report::more(if unreadable { self.count.unreadable } else { self.count.degraded }, "files");
        }
        Ok(())
    }
}

/// A folder's or file's place: the folder it is in, and its name there.
type Place = (Ino, Raw);

/// Folders and their names, as far as they were needed.
struct Folders<'a> {
    tool: &'a Tool,
    volumes: HashMap<VolumeId, String>,
    known: HashMap<(VolumeId, Ino), Place>,
}

impl<'a> Folders<'a> {
    fn new(tool: &'a Tool) -> Folders<'a> {
        Folders { tool, volumes: HashMap::new(), known: HashMap::new() }
    }

    /// The volume of each of these files and its path there, if it has one.
    async fn paths(&mut self, files: &[File]) -> anyhow::Result<Vec<(String, Option<String>)>> {
        if self.known.len() > FOLDERS_MAX {
            self.known.clear();
        }
        let mut leaves: HashMap<(VolumeId, Ino), Place> = HashMap::new();
        // What is looked for in which folder: first the files, then their folders, and so on upwards.
        let mut wanted: BTreeMap<(VolumeId, Ino), BTreeSet<Ino>> = BTreeMap::new();
        for file in files {
            // Also for one without a name: it tells what its volume is called.
            wanted.entry((file.volume, file.parent)).or_default().insert(file.ino);
        }
        for depth in 0..DEPTH_MAX {
            let mut above: BTreeMap<(VolumeId, Ino), BTreeSet<Ino>> = BTreeMap::new();
            for ((volume, folder), inodes) in std::mem::take(&mut wanted) {
                let names = if depth == 0 { &mut leaves } else { &mut self.known };
                let parent = search(self.tool, (volume, folder), inodes, names, &mut self.volumes).await?;
                let known = folder == Ino::ROOT || self.known.contains_key(&(volume, folder));
                if let Some(parent) = parent.filter(|_| !known) {
                    above.entry((volume, parent)).or_default().insert(folder);
                }
            }
            if above.is_empty() {
                break;
            }
            wanted = above;
        }
        Ok(files.iter().map(|file| (self.volume(file.volume), self.path(file, &leaves))).collect())
    }

    fn volume(&self, id: VolumeId) -> String {
        self.volumes.get(&id).cloned().unwrap_or_else(|| format!("volume {id}"))
    }

    fn path(&self, file: &File, leaves: &HashMap<(VolumeId, Ino), Place>) -> Option<String> {
        let (folder, name) = leaves.get(&(file.volume, file.ino)).filter(|_| file.named)?;
        let (mut folder, mut names) = (*folder, vec![name]);
        while folder != Ino::ROOT && names.len() < DEPTH_MAX {
            let (above, name) = self.known.get(&(file.volume, folder))?;
            names.push(name);
            folder = *above;
        }
        let text = names.iter().rev().map(|name| format!("/{}", String::from_utf8_lossy(name)));
        Some(text.collect())
    }
}

/// Notes what these inodes are called in a folder; answers the folder above it. Whatever is not there has moved or gone.
async fn search(
    tool: &Tool,
    (volume, folder): (VolumeId, Ino),
    mut inodes: BTreeSet<Ino>,
    names: &mut HashMap<(VolumeId, Ino), Place>,
    volumes: &mut HashMap<VolumeId, String>,
) -> anyhow::Result<Option<Ino>> {
    let mut after = Raw::from(Vec::new());
    loop {
        let listed = match tool.list_names(volume, folder, after, PAGE).await {
            Ok(listed) => listed,
            Err(fault) if fault.code == Code::NotFound => return Ok(None),
            Err(fault) => return Err(fault.into()),
        };
        volumes.entry(volume).or_insert(listed.volume);
        let last = listed.names.last().map(|(_, name)| name.clone());
        for (ino, name) in listed.names {
            if inodes.remove(&ino) {
                names.insert((volume, ino), (folder, name));
            }
        }
        match last {
            Some(last) if !listed.end && !inodes.is_empty() => after = last,
            _ => return Ok(Some(listed.parent)),
        }
    }
}

/// A name may hold anything; what would spoil a terminal is shown by its number.
fn clean(path: &str) -> String {
    path.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_spoil_a_terminal() {
        assert_eq!(clean("/a b/\u{1b}[2Jä\n"), "/a b/\\u{1b}[2Jä\\n");
    }
}
