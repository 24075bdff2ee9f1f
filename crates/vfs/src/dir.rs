//! Folders: opendir, readdir, releasedir, fsyncdir, syncfs.
//!
//! A listing is fetched in pages and streamed; nothing holds a large folder whole. Cookies are the service's, which survive
//! restarts; `.` and `..` are the caller's to add. A folder that was listed from end to end while its names were leased and
//! nothing in it changed is complete: names it does not know are absent.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use torchfs_proto::attr::Attr;
use torchfs_proto::msg::meta::{DirEntry, Done, ENTRIES_MAX, Op};
use torchfs_proto::{Ino, Result};

use crate::node::{Asked, Inode};
use crate::open::Handle;
use crate::{DirItem, Fh, Opened, Vfs, unexpected};

/// Where an open folder's listing is.
#[derive(Default)]
pub(crate) struct Listing {
    /// A page of entries, the first of which follows the cookie `after`. They stay here, since the kernel may take fewer
    /// than it was offered and come again for the rest.
    entries: Vec<DirEntry>,
    after: u64,
    plus: bool,
    end: bool,
    whole: Option<Whole>,
    /// What the page names, where attributes were asked for; kept here until the kernel had its chance to refer to it.
    nodes: Vec<Option<Arc<Inode>>>,
    /// The names of the page are all among those of the folder that have this number, if no change came since.
    kept: Option<Kept>,
    /// The page after this one, asked for when half of this one was taken.
    ahead: Option<Ahead>,
}

/// An answer on its way, with what was noted before it was asked for.
type Asking = Shared<BoxFuture<'static, (Asked, u64, Result<Done>)>>;

/// A page asked for before it is wanted.
struct Ahead {
    after: u64,
    plus: bool,
    asking: Asking,
}

/// When all names of a page were noted in their folder.
#[derive(Clone, Copy)]
struct Kept {
    serial: u64,
    changes: u64,
}

/// A listing from the start under a lease, so far without a gap.
#[derive(Clone, Copy)]
struct Whole {
    asked: Asked,
    changes: u64,
    listed: usize,
}

impl Listing {
    /// Where in the page what follows a cookie begins, if the cookie is in it.
    fn place(&self, after: u64) -> Option<usize> {
        if after == self.after {
            return Some(0);
        }
        self.entries.binary_search_by_key(&after, |entry| entry.cookie).ok().map(|at| at + 1)
    }

    /// What of the page follows a cookie, if the cookie is in it.
    fn rest(&self, after: u64) -> Option<&[DirEntry]> {
        self.entries.get(self.place(after)?..)
    }
}

impl Vfs {
    /// Opens a folder for listing.
    pub async fn opendir(&self, ino: Ino) -> Result<Opened> {
        let node = self.node(ino);
        node.lock().handles += 1;
        Ok(Opened {
            fh: self.new_handle(node, false, false, false, 0, None),
            direct: false,
            keep_cache: false,
        })
    }

    /// Entries after a cookie (0 from the start), at most `want`; none at the end.
    pub async fn readdir(
        &self,
        _ino: Ino,
        fh: Fh,
        cookie: u64,
        want: usize,
        plus: bool,
    ) -> Result<Vec<DirItem>> {
        let handle = self.handle(fh)?;
        if !self.has_page(&handle, cookie, plus) {
            self.fetch_page(&handle, cookie, plus).await?;
        }
        let (items, next) = {
            let listing = handle.listing.lock();
            let from = listing.place(cookie).unwrap_or(listing.entries.len());
            let rest = listing.entries.get(from..).unwrap_or_default();
            let nodes = listing.nodes.get(from..).unwrap_or_default();
            let ttl = self.names_ttl(&handle.node, &listing).filter(|_| plus);
            let items: Vec<DirItem> = (rest.iter().zip(nodes).take(want.max(1)))
                .map(|(entry, node)| self.item(&handle.node, entry, node.as_ref().filter(|_| plus), ttl))
                .collect();
            let wanted = !listing.end && listing.ahead.is_none() && rest.len() <= listing.entries.len() / 2;
            (items, rest.last().filter(|_| wanted).map(|last| last.cookie))
        };
        if let Some(after) = next {
            self.ask_ahead(&handle, after, plus);
        }
        Ok(items)
    }

    /// A listing is done.
    pub async fn releasedir(&self, fh: Fh) {
        if let Some(handle) = self.0.handles.write().remove(&fh) {
            self.closed(&handle.node, false);
        }
    }

    /// The folder's entries are durable when it returns.
    pub async fn fsyncdir(&self, ino: Ino) -> Result<()> {
        let mark = self.node(ino).lock().mark;
        self.0.meta.durable(mark).await
    }

    /// Everything is durable when it returns. It fails if something was lost meanwhile, or before and no descriptor told of it.
    pub async fn syncfs(&self) -> Result<()> {
        let dirty: Vec<_> = self.0.dirty.lock().values().cloned().collect();
        let errors = |node: &Arc<Inode>| node.lock().file.as_ref().map_or(0, |file| file.errors);
        let dirty: Vec<_> = dirty.into_iter().map(|node| (errors(&node), node)).collect();
        // All at once, then one after the other: the second only waits.
        self.flush_dirty(|_| true);
        let mut written = Ok(());
        for (seen, node) in dirty {
            self.write_back(&node).await;
            written = written.and(node.lock().file.as_ref().map_or(Ok(()), |file| file.check(seen)));
        }
        let unheard = self.0.unheard.lock().take().map_or(Ok(()), Err);
        let durable = self.0.meta.durable_all().await;
        written.and(unheard).and(durable)
    }

    /// Whether what follows a cookie is here, or known to be nothing.
    fn has_page(&self, handle: &Handle, after: u64, plus: bool) -> bool {
        let listing = handle.listing.lock();
        // From the start is always fetched anew, as rewinddir asks for.
        after > 0
            && (listing.plus || !plus)
            && listing.rest(after).is_some_and(|rest| !rest.is_empty() || listing.end)
    }

    async fn fetch_page(&self, handle: &Handle, after: u64, plus: bool) -> Result<()> {
        let (node, ino) = (&handle.node, handle.node.ino);
        let ahead = handle.listing.lock().ahead.take_if(|ahead| ahead.after == after && ahead.plus == plus);
        let (asked, changes, done) = match ahead {
            Some(ahead) if after > 0 => ahead.asking.await,
            _ => self.ask_page(node.clone(), after, plus).await,
        };
        let done = done?;
        let Done::Entries { entries, end } = done else { return Err(unexpected("readdir", &done)) };
        let before = {
            let listing = handle.listing.lock();
            match after {
                0 => Some(Whole { asked, changes, listed: 0 }),
                _ => listing.whole.filter(|_| listing.rest(after).is_some_and(<[_]>::is_empty)),
            }
        };

        // An entry is kept if nothing can have changed since this page was asked for; the whole, since the first page.
        let kept = self.keep_page(node, &entries, asked, changes);
        let whole = before
            .filter(|whole| kept.is_some() && self.is_current(whole.asked, ino) && whole.changes == changes)
            .map(|whole| Whole { listed: whole.listed + entries.len(), ..whole });
        if let Some(whole) = whole.filter(|_| end)
            && let Some((names, _)) = node.lock().find_names(&self.0.meta, ino)
        {
            // Entries may have been dropped to keep within bounds while the listing went on.
            names.complete |= names.map.values().flatten().count() == whole.listed;
        }
        self.bound_entries();
        let learn = |attr: &Attr| {
            let child = self.node(attr.ino);
            let current = self.is_current(asked, attr.ino);
            child.lock().learn(&self.0.meta, attr.clone(), current);
            child
        };
        let nodes = entries.iter().map(|entry| entry.attr.as_ref().map(learn)).collect();
        *handle.listing.lock() = Listing { entries, after, plus, end, whole, nodes, kept, ahead: None };
        Ok(())
    }

    /// Asks for a page; notes first what may overtake the answer.
    fn ask_page(
        &self,
        node: Arc<Inode>,
        after: u64,
        plus: bool,
    ) -> impl Future<Output = (Asked, u64, Result<Done>)> + Send + use<> {
        let vfs = self.clone();
        async move {
            let changes = node.lock().changes;
            let asked = vfs.asked();
            let op = Op::ReadDir { ino: node.ino, cookie: after, limit: ENTRIES_MAX as u32, plus };
            (asked, changes, vfs.0.meta.ask(op).await)
        }
    }

    /// Asks for the page that will be wanted next, while the kernel works on this one.
    fn ask_ahead(&self, handle: &Handle, after: u64, plus: bool) {
        let asking: Asking = self.ask_page(handle.node.clone(), after, plus).boxed().shared();
        handle.listing.lock().ahead = Some(Ahead { after, plus, asking: asking.clone() });
        self.0.meta.spawn(async move {
            // Whoever comes for the page hears what came of it.
            let _ = asking.await;
        });
    }

    /// Notes the entries of a page in the folder.
    fn keep_page(&self, node: &Inode, entries: &[DirEntry], asked: Asked, changes: u64) -> Option<Kept> {
        let mut state = node.lock();
        if !self.is_current(asked, node.ino) || state.changes != changes || state.busy > 0 {
            return None;
        }
        self.leased_names(&mut state, node.ino)?;
        let names = state.names.as_mut()?;
        let before = names.map.len();
        names.map.reserve(entries.len());
        for entry in entries {
            names.map.insert(Bytes::copy_from_slice(&entry.name), Some(entry.ino));
        }
        self.0.entries.fetch_add(names.map.len() - before, Ordering::Relaxed);
        Some(Kept { serial: names.serial, changes })
    }

    /// For how long the kernel may keep the names of a page, if all of them are surely among those of the folder.
    fn names_ttl(&self, folder: &Inode, listing: &Listing) -> Option<Duration> {
        let kept = listing.kept?;
        let mut state = folder.lock();
        if state.changes != kept.changes {
            return None;
        }
        let (names, ttl) = state.find_names(&self.0.meta, folder.ino)?;
        (names.serial == kept.serial).then_some(ttl)
    }

    fn item(
        &self,
        folder: &Inode,
        entry: &DirEntry,
        child: Option<&Arc<Inode>>,
        ttl: Option<Duration>,
    ) -> DirItem {
        let node = child.zip(entry.attr.as_ref()).map(|(child, attr)| {
            let known = ttl.or_else(|| {
                let mut state = folder.lock();
                let (names, ttl) = state.find_names(&self.0.meta, folder.ino)?;
                (names.map.get(&entry.name[..]) == Some(&Some(entry.ino))).then_some(ttl)
            });
            let ttl = known.map_or(Duration::ZERO, |ttl| self.kernel_ttl(ttl));
            let state = child.lock();
            let answer = self.answer(&state, attr.clone());
            // The kernel must drop pages before it hears of a greater length: it will ask for this one.
            let grown = state.file.as_ref().is_some_and(|file| file.paged && answer.attr.size > file.told);
            (!grown).then_some((answer, ttl))
        });
        let node = node.flatten();
        DirItem {
            name: Bytes::copy_from_slice(&entry.name),
            ino: entry.ino,
            kind: entry.kind,
            cookie: entry.cookie,
            node,
        }
    }
}
