//! Who writes here: cluster, incarnation and fence in a small file that is overwritten in place.
//!
//! Two slots take turns, so that a power cut always leaves one whole, and no write needs new space: a full disk does not
//! keep the engine from opening. The file appears last when a folder is made, so without it there is no engine yet.
//!
//! # Invariants
//! - [`Identity::rise`] returns only after the higher fence and incarnation are durable.

use std::io::{self, Read};
use std::sync::Arc;

use torchfs_proto::disk::{Disk, DiskFile};
use torchfs_proto::{ClusterId, Fence, Incarnation};

use crate::Floor;
use crate::error::{Error, Result};
use crate::log::format::{HeaderPage, Kind, PAGE, Writer};

const FILE: &str = "engine.id";
const FILE_NEW: &str = "engine.id.new";

/// The file, open, with its newest slot.
pub struct Identity {
    file: Arc<dyn DiskFile>,
    slot: usize,
    page: HeaderPage,
}

impl Identity {
    /// The identity of a folder, if it has one.
    pub fn load(disk: &dyn Disk) -> Result<Option<Identity>> {
        let file = match disk.open(FILE) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(Error::Io { what: format!("cannot open {FILE}"), source }),
        };
        let mut bytes = vec![0; 2 * PAGE];
        let n = file.read_at(&mut bytes, 0).map_err(Error::io(format!("cannot read {FILE}")))?;
        let (slot, page) = HeaderPage::newest(&bytes[..n], Kind::Identity, FILE)?;
        Ok(Some(Identity { file, slot, page }))
    }

    /// Makes the file; the folder is an engine's when this returns. Fence and incarnation start at 0, which nobody
    /// ever writes with.
    pub fn create(disk: &dyn Disk, cluster: ClusterId) -> Result<Identity> {
        let failed = |what: &str| Error::io(format!("cannot {what} {FILE}"));
        match disk.remove(FILE_NEW) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed("clear the way for")(e)),
            _ => {}
        }
        let page = HeaderPage { cluster, ..HeaderPage::default() };
        let file = disk.create(FILE_NEW).map_err(failed("create"))?;
        let mut bytes = page.encode(Kind::Identity).to_vec();
        bytes.resize(2 * PAGE, 0);
        file.write_at(&bytes, 0).map_err(failed("write"))?;
        file.sync().map_err(failed("sync"))?;
        disk.rename(FILE_NEW, FILE).map_err(failed("name"))?;
        disk.sync_names().map_err(failed("sync the name of"))?;
        Ok(Identity { file, slot: 0, page })
    }

    /// Whose folder it is.
    pub fn cluster(&self) -> ClusterId {
        self.page.cluster
    }

    /// Raises fence and incarnation, above the floor if there is one, durably.
    pub fn rise(&mut self, floor: Option<Floor>) -> Result<Writer> {
        let failed = |what: &str| Error::io(format!("cannot {what} {FILE}"));
        let slot = 1 - self.slot;
        let floor = floor.unwrap_or_default();
        let incarnation = self.page.incarnation.max(floor.incarnation).0.checked_add(1);
        let number = self.page.number.max(floor.fence.0).checked_add(1);
        let (Some(incarnation), Some(number)) = (incarnation, number) else {
            return Err(Error::Corrupt { what: format!("{FILE}: there is no higher fence or incarnation") });
        };
        let page = HeaderPage {
            incarnation: Incarnation(incarnation),
            turn: self.page.turn + 1,
            number,
            ..self.page
        };
        self.file.write_at(&page.encode(Kind::Identity), (slot * PAGE) as u64).map_err(failed("write"))?;
        self.file.sync().map_err(failed("sync"))?;
        (self.slot, self.page) = (slot, page);
        Ok(Writer { cluster: page.cluster, incarnation: page.incarnation, fence: Fence(page.number) })
    }
}

/// A fresh cluster id.
pub fn draw_cluster() -> Result<ClusterId> {
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(Error::io("cannot draw a cluster id from /dev/urandom"))?;
    // 0 stands for "none yet".
    Ok(ClusterId(u64::from_le_bytes(bytes).max(1)))
}
