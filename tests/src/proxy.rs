//! A small TCP proxy that loses what a test wants lost.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

/// What happens to the next request that contains the mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// Nothing.
    None = 0,
    /// It is not passed on, and the connection ends.
    Request = 1,
    /// It is passed on, the answer is awaited and swallowed, and the connection ends.
    Answer = 2,
    /// It is passed on, and the connection ends at once.
    Both = 3,
    /// It is passed on and answered. The request after it is not passed on, and the connection ends.
    Next = 4,
}

/// A proxy in front of one address. It lives as long as the test process.
#[derive(Clone, Debug)]
pub struct Proxy {
    address: String,
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    target: Mutex<String>,
    mark: Vec<u8>,
    loss: AtomicU32,
    lost: AtomicU64,
    open: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// Stands in front of `target`; requests that contain `mark` can be lost.
    pub fn start(target: &str, mark: &[u8]) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has ports");
        let address = listener.local_addr().expect("it is bound").to_string();
        let inner = Arc::new(Inner {
            target: Mutex::new(target.to_owned()),
            mark: mark.to_vec(),
            loss: AtomicU32::new(0),
            lost: AtomicU64::new(0),
            open: Mutex::default(),
        });
        let accepting = inner.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let target = accepting.target.lock().clone();
                let Ok(server) = TcpStream::connect(&target) else { continue };
                for stream in [&client, &server] {
                    stream.set_nodelay(true).ok();
                    accepting.open.lock().extend(stream.try_clone());
                }
                accepting.clone().join(client, server);
            }
        });
        Proxy { address, inner }
    }

    /// Where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Loses the next request with the mark in this way.
    pub fn lose(&self, loss: Loss) {
        self.inner.loss.store(loss as u32, Ordering::SeqCst);
    }

    /// How many were lost so far.
    pub fn lost(&self) -> u64 {
        self.inner.lost.load(Ordering::SeqCst)
    }

    /// Ends all connections.
    pub fn cut(&self) {
        for stream in self.inner.open.lock().drain(..) {
            stream.shutdown(Shutdown::Both).ok();
        }
    }
}

impl Inner {
    /// Passes bytes both ways until either end is gone.
    fn join(self: Arc<Inner>, client: TcpStream, server: TcpStream) {
        let (Ok(mut from_server), Ok(mut to_client)) = (server.try_clone(), client.try_clone()) else {
            return;
        };
        let swallow = Arc::new(AtomicU32::new(0));
        let swallowing = swallow.clone();
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            while let Ok(n @ 1..) = from_server.read(&mut buffer) {
                if swallowing.load(Ordering::SeqCst) != 0 || to_client.write_all(&buffer[..n]).is_err() {
                    break;
                }
            }
            from_server.shutdown(Shutdown::Both).ok();
            to_client.shutdown(Shutdown::Both).ok();
        });
        let (mut from_client, mut to_server) = (client, server);
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            let mut last = false;
            while let Ok(n @ 1..) = from_client.read(&mut buffer) {
                if last {
                    break;
                }
                let marked = buffer[..n].windows(self.mark.len()).any(|w| w == self.mark);
                let loss = if marked { self.loss.swap(0, Ordering::SeqCst) } else { 0 };
                if loss != 0 {
                    self.lost.fetch_add(1, Ordering::SeqCst);
                }
                if loss == Loss::Answer as u32 {
                    // The other thread ends both when the answer comes.
                    swallow.store(1, Ordering::SeqCst);
                }
                last = loss == Loss::Next as u32;
                if loss == Loss::Request as u32
                    || to_server.write_all(&buffer[..n]).is_err()
                    || loss == Loss::Both as u32
                {
                    break;
                }
            }
            from_client.shutdown(Shutdown::Both).ok();
            to_server.shutdown(Shutdown::Both).ok();
        });
    }
}
