//! The toy on the real device, for one test or measurement.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use torchfs_agent::fuse::Notice;
use torchfs_agent::mount::{MountOptions, Umount};
use torchfs_agent::{Error, FuseConfig, Served};

use crate::toy::Toy;

/// A toy served for one test.
pub struct Stage {
    pub toy: Arc<Toy>,
    pub served: Served,
    pub runtime: tokio::runtime::Runtime,
    _dir: tempfile::TempDir,
    pub path: PathBuf,
}

impl Stage {
    pub fn new() -> Option<Stage> {
        Stage::with(FuseConfig::default(), Duration::ZERO)
    }

    /// `None` where nothing can be served.
    pub fn with(config: FuseConfig, keep: Duration) -> Option<Stage> {
        let dir = tempfile::tempdir().unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let toy = Toy::new(keep);
        let options = MountOptions::new(dir.path());
        let handler = Arc::clone(&toy);
        match runtime.block_on(Served::new(&options, config, move |_| handler)) {
            Ok(served) => Some(Stage { toy, path: served.path().to_path_buf(), served, runtime, _dir: dir }),
            Err(error @ (Error::NoDevice(_) | Error::NoRights { .. })) => {
                eprintln!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn tell(&self, notice: Notice) {
        self.runtime.block_on(self.served.notifier().apply(notice));
    }

    pub fn end(mut self) {
        // Another test that starts a process holds our open files for a moment, between fork and exec.
        until("nobody uses the mount", || match self.runtime.block_on(self.served.unmount(Umount::Normal)) {
            Err(Error::InUse { .. }) => false,
            ended => {
                ended.unwrap();
                true
            }
        });
    }
}

/// Waits for something that must come.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
