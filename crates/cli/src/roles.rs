//! What each role is made of: its folder, its service, its listener, and how it ends.
//!
//! A role is started, lives until it is told to stop, and is then taken apart in the right order. `up` starts several in
//! one process and lets them call each other directly through [`Cluster::local`].

mod cluster;
mod data;
mod follower;
mod identity;
mod meta;
mod mount;

use std::future::Future;
use std::path::Path;

use anyhow::Context;

pub use cluster::{Cluster, tool};
pub use data::{Advertise, Data, DataOptions, DataStart};
pub use follower::DatabaseOptions;
pub use meta::{Meta, MetaOptions};
pub use mount::{Mount, MountOptions, unmount};

/// Runs the process's one runtime.
pub fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    raise_descriptors();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("runtime")
        .build()
        .context("cannot start threads")?;
    let result = runtime.block_on(work);
    // What still runs is background work of roles that were stopped already.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    result
}

/// Takes as many descriptors as the system allows: each connection is one, and the usual limit of 1,024 would be the number of
/// clients that a server can have.
fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!(%error, "the limit of descriptors stays as it is");
    }
}

/// Ends when the process is asked to stop. Registered at once, so that no signal is missed while roles start.
pub fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    })
}

/// Tells systemd, if that started us, that the role is ready.
pub fn ready() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let addr = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    let told = addr.and_then(|addr| UnixDatagram::unbound()?.send_to_addr(b"READY=1", &addr)).map(|_| ());
    if let Err(error) = told {
        tracing::warn!("cannot tell systemd that all is ready: {error}");
    }
}

/// Makes a folder that only its owner may read, or says why it cannot.
pub fn make_dir(dir: &Path) -> anyhow::Result<()> {
    torchfs_disk::make_dir_durably(dir).with_context(|| {
        format!("cannot make the folder {}; choose another --dir, or make it writable", dir.display())
    })
}
