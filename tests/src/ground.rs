//! The ground on which a POSIX test stands: `torchfs up` with one mount, or any folder named by `TORCHFS_TEST_ON`.
//!
//! The idea: run the same tests on ext4 first. A test that fails there is wrong, not the file system:
//! `TORCHFS_TEST_ON=/tmp cargo test --release -p torchfs-tests --test real posix::`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::cluster::{Client, Mount, Options, make_secret, meta_flags};
use crate::ports::Port;
use crate::sandbox::Sandbox;

/// A mounted, empty file system.
#[derive(Debug)]
pub struct Ground {
    dir: PathBuf,
    up: Option<Up>,
    sandbox: Arc<Sandbox>,
}

/// `torchfs up`: all roles in one process.
#[derive(Debug)]
pub struct Up {
    /// The process and its mount.
    pub mount: Mount,
    /// How commands reach it.
    pub client: Client,
    _port: Port,
}

impl Ground {
    /// Makes one.
    pub fn new() -> Ground {
        let sandbox = Sandbox::new();
        if let Some(on) = std::env::var_os("TORCHFS_TEST_ON") {
            let mut name = sandbox.root().file_name().expect("a sandbox has a name").to_owned();
            name.push(".on");
            let dir = Path::new(&on).join(name);
            std::fs::create_dir_all(&dir).expect("the given folder takes folders");
            return Ground { dir, up: None, sandbox };
        }
        let up = Up::start(&sandbox, &Options::default());
        Ground { dir: up.mount.path().to_owned(), up: Some(up), sandbox }
    }

    /// The root of it.
    pub fn root(&self) -> &Path {
        &self.dir
    }

    /// A path in it.
    pub fn at(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The cluster under it, unless it is a plain folder.
    pub fn up(&mut self) -> Option<&mut Up> {
        self.up.as_mut()
    }

    /// The test's own folder, outside of it.
    pub fn sandbox(&self) -> &Arc<Sandbox> {
        &self.sandbox
    }

    /// Stops and starts the process under it; a plain folder stays as it is.
    pub fn restart(&mut self) {
        if let Some(up) = &mut self.up {
            up.mount.agent.stop();
            up.mount.detach();
            up.mount.start();
        }
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        if self.up.is_none() {
            std::fs::remove_dir_all(&self.dir).ok();
        }
    }
}

impl Default for Ground {
    fn default() -> Ground {
        Ground::new()
    }
}

impl Up {
    /// Starts `torchfs up` with a mount and waits until it answers.
    pub fn start(sandbox: &Arc<Sandbox>, options: &Options) -> Up {
        let dir = sandbox.path("up");
        let path = sandbox.folder("mnt");
        let port = Port::reserve();
        let client = Client::new(sandbox, &port.address(), &make_secret(sandbox));
        let mut process = client.process("up", "up");
        process
            .args(["--dir".as_ref(), dir.as_os_str(), "--listen".as_ref(), port.address().as_ref()])
            .args(["--servers", &options.servers.to_string()])
            .args(["--mount".as_ref(), path.as_os_str()])
            .args(meta_flags(options))
            .args(&options.data_args)
            .args(&options.mount_args);
        let mut mount = Mount::of(process, &path);
        mount.start();
        Up { mount, client, _port: port }
    }
}
