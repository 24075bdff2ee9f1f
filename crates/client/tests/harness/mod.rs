//! Fake services whose every move the test decides, and ways to reach them within the process or over TCP.
#![allow(dead_code)]

pub mod data;
pub mod meta;

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use torchfs_client::Connector;
use torchfs_rpc::{Config, Connection, Link, Listener, Peer, Role, ServerHandle, Service, serve};

/// Generous: only a broken test reaches it.
pub const LONG: Duration = Duration::from_secs(60);

/// How services are reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    Local,
    Tcp,
}

/// The network: services by their address.
#[derive(Clone, Default)]
pub struct Net {
    local: Arc<Mutex<HashMap<String, Arc<dyn Service>>>>,
    servers: Arc<Mutex<Vec<ServerHandle>>>,
}

impl Net {
    /// Makes a service reachable and returns its address.
    pub async fn add(&self, transport: Transport, service: Arc<dyn Service>) -> String {
        match transport {
            Transport::Local => {
                let mut local = self.local.lock();
                let addr = format!("local:{}", local.len());
                local.insert(addr.clone(), service);
                addr
            }
            Transport::Tcp => {
                let listener = Listener::bind("127.0.0.1:0", Config::default()).await.expect("bound");
                let addr = listener.local_addr().to_string();
                self.servers.lock().push(serve(listener, service));
                addr
            }
        }
    }

    /// Ends every TCP server at once, with its connections.
    pub fn cut(&self) {
        self.servers.lock().clear();
    }

    /// Serves again where a server was before.
    pub async fn serve_again(&self, addr: &str, service: Arc<dyn Service>) {
        let began = Instant::now();
        let listener = loop {
            match Listener::bind(addr, Config::default()).await {
                Ok(listener) => break listener,
                Err(fault) => assert!(began.elapsed() < LONG, "cannot bind {addr} again: {fault}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        self.servers.lock().push(serve(listener, service));
    }
}

impl Connector for Net {
    fn link(&self, addr: &str) -> Link {
        match self.local.lock().get(addr) {
            Some(service) => Link::fixed(Connection::local(service.clone(), Peer::new(addr, Role::Agent))),
            None => Link::new(addr, Config::default()),
        }
    }
}

/// Waits until a condition holds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < LONG, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Waits for a future, not for ever.
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(LONG, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited in vain: {what}"),
    }
}
