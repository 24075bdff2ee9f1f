//! The pages every role serves when given an address: `/metrics` in Prometheus text and `/healthz`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Says whether the role is well, or what is wrong with it.
pub type Health = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// A request longer than this is refused; two short lines are all we serve.
const REQUEST_MAX: usize = 8 << 10;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// What was measured is added up so often, whether or not somebody asks for the page.
const UPKEEP: Duration = Duration::from_secs(5);

/// The pages' address, taken and collecting; serves nothing yet.
///
/// Made before the roles, since what they count before anybody collects is lost.
pub struct Pages {
    listener: TcpListener,
    metrics: PrometheusHandle,
}

/// Begins to collect metrics if there is an address to serve them at.
pub async fn collect(addr: Option<&str>) -> anyhow::Result<Option<Pages>> {
    let Some(addr) = addr else { return Ok(None) };
    let listener = TcpListener::bind(addr).await.with_context(|| {
        format!("cannot serve metrics at {addr}; choose another address with --metrics HOST:PORT")
    })?;
    // Waits on connections are counted in classes, so that two moments can be compared; other times are shown as quantiles.
    let waits = Matcher::Prefix("torchfs_rpc_".to_owned());
    let metrics = PrometheusBuilder::new()
        .set_buckets_for_metric(waits, &wait_classes())
        .and_then(PrometheusBuilder::install_recorder)
        .context("cannot start metrics")?;
    for describe in [
        torchfs_rpc::metrics::describe,
        torchfs_engine::metrics::describe,
        torchfs_client::metrics::describe,
        torchfs_vfs::metrics::describe,
        torchfs_meta::metrics::describe,
        torchfs_block::metrics::describe,
    ] {
        describe();
    }
    Ok(Some(Pages { listener, metrics }))
}

/// Serves the pages for a role that has started.
pub fn serve(pages: Option<Pages>, health: Health) -> anyhow::Result<()> {
    let Some(Pages { listener, metrics }) = pages else { return Ok(()) };
    let local: SocketAddr = listener.local_addr()?;
    tracing::info!("metrics at http://{local}/metrics");
    let upkeep = metrics.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(UPKEEP).await;
            upkeep.run_upkeep();
        }
    });
    tokio::spawn(async move {
        let limit = Arc::new(tokio::sync::Semaphore::new(32));
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let Ok(permit) = limit.clone().acquire_owned().await else { return };
            let (metrics, health) = (metrics.clone(), health.clone());
            tokio::spawn(async move {
                let _ = tokio::time::timeout(REQUEST_TIMEOUT, answer(stream, &metrics, &health)).await;
                drop(permit);
            });
        }
    });
    Ok(())
}

/// Bounds of the classes of waits: from a tenth of a microsecond to ten seconds, each a quarter above the one before.
fn wait_classes() -> Vec<f64> {
    std::iter::successors(Some(1e-7), |bound| Some(bound * 1.25)).take_while(|bound| *bound < 10.0).collect()
}

async fn answer(mut stream: TcpStream, metrics: &PrometheusHandle, health: &Health) -> std::io::Result<()> {
    let mut head = Vec::new();
    let mut part = [0; 1024];
    while !head.windows(4).any(|w| w == b"\r\n\r\n") {
        let n = stream.read(&mut part).await?;
        if n == 0 || head.len() + n > REQUEST_MAX {
            return Ok(());
        }
        head.extend_from_slice(&part[..n]);
    }
    let line = String::from_utf8_lossy(head.split(|b| *b == b'\r').next().unwrap_or_default()).into_owned();
    let (status, body) = match line.split(' ').nth(1) {
        Some("/metrics") => ("200 OK", metrics.render()),
        Some("/healthz") => match health() {
            Ok(()) => ("200 OK", "ok\n".to_string()),
            Err(sentence) => ("503 Service Unavailable", format!("{sentence}\n")),
        },
        _ => ("404 Not Found", "see /metrics and /healthz\n".to_string()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}
