//! How roles reach each other: over TCP with the secret, or within the process.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use torchfs_client::{Connector, Tool, ToolConfig};
use torchfs_rpc::{Config, Connection, Link, Peer, Role, Secret, Service};

use super::Meta;
use crate::connect::Found;

/// A cluster as one process sees it.
#[derive(Clone)]
pub struct Cluster {
    /// Addresses of the metadata service.
    pub meta: Vec<String>,
    /// The shared secret.
    pub secret: Secret,
    /// Services of this process by the address they listen at; those are called directly.
    here: Arc<Mutex<HashMap<String, Arc<dyn Service>>>>,
}

impl Cluster {
    /// All others are other processes.
    pub fn remote(found: &Found) -> Cluster {
        Cluster { meta: found.meta.clone(), secret: Secret::new(&found.secret), here: Arc::default() }
    }

    /// The metadata service is in this process.
    pub fn local(meta: &Meta, secret: &[u8]) -> Cluster {
        let cluster = Cluster { meta: vec![meta.addr()], secret: Secret::new(secret), here: meta.here() };
        cluster.add(&meta.addr(), meta.service());
        cluster
    }

    /// A service of this process.
    pub fn add(&self, addr: &str, service: Arc<dyn Service>) {
        self.here.lock().insert(addr.to_string(), service);
    }

    /// Opens links for a process of this role.
    pub fn connector(&self, role: Role) -> Arc<dyn Connector> {
        Arc::new(Links { role, secret: self.secret.clone(), here: self.here.clone() })
    }
}

/// Opens links by address.
pub struct Links {
    /// What this process is to the others.
    pub role: Role,
    /// The shared secret.
    pub secret: Secret,
    /// Services of this process.
    pub here: Arc<Mutex<HashMap<String, Arc<dyn Service>>>>,
}

impl Connector for Links {
    fn link(&self, addr: &str) -> Link {
        if let Some(service) = self.here.lock().get(addr) {
            return Link::fixed(Connection::local(service.clone(), Peer::new(addr, self.role)));
        }
        let config = Config { role: self.role, secret: self.secret.clone(), ..Config::default() };
        Link::new(addr, config)
    }
}

/// A tool for commands that ask and print.
pub fn tool(found: &Found) -> Tool {
    let cluster = Cluster::remote(found);
    // Somebody waits for the answer; a takeover takes less.
    let config = ToolConfig { unreachable: std::time::Duration::from_secs(10), ..ToolConfig::default() };
    Tool::new(&cluster.meta, cluster.connector(Role::Tool), config)
}
