//! A few threads that wait for one disk.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use torchfs_proto::ServerId;

use crate::promise::{Promise, promise};
use crate::{Error, Result};

/// Threads of one disk. What they are given is bounded by the gate before the disk.
pub(crate) struct Readers {
    jobs: OnceLock<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    server: ServerId,
}

type Job = Box<dyn FnOnce() + Send>;

impl Readers {
    /// Starts so many.
    pub fn start(server: ServerId, threads: usize) -> Result<Readers> {
        let (jobs, queue) = channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        let mut readers = Readers { jobs: OnceLock::from(jobs), threads: Vec::new(), server };
        for n in 0..threads.max(1) {
            let queue = queue.clone();
            let thread = std::thread::Builder::new()
                .name(format!("block-reader-{server}-{n}"))
                .spawn(move || work(&queue))
                .map_err(|e| Error::Io { server, what: "start a reader's thread", why: e.to_string() })?;
            readers.threads.push(thread);
        }
        Ok(readers)
    }

    /// Runs a job on one of the threads; `None` comes if they are stopping.
    pub fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Promise<T> {
        let (giver, promise) = promise();
        let job: Job = Box::new(move || {
            // A caller that is gone does not want to know.
            let _ = giver.give(job());
        });
        if let Some(jobs) = self.jobs.get() {
            // The threads end only after the queue does; a job that is not taken breaks its promise.
            let _ = jobs.send(job);
        }
        promise
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.jobs.take();
        let here = std::thread::current().id();
        for thread in self.threads.drain(..) {
            // The last job may be what held the disk.
            if thread.thread().id() != here && thread.join().is_err() {
                tracing::error!(server = %self.server, "a block reader's thread panicked");
            }
        }
    }
}

fn work(queue: &Mutex<Receiver<Job>>) {
    loop {
        // Only one of the threads waits for the next job; the others work or wait for their turn to wait.
        let next = queue.lock().recv();
        match next {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}
