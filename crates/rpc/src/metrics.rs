//! What this crate counts, by name, unit and meaning.
//!
//! Handles are made once per connection or listener, so that counting costs an atomic add on the hot path.

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::config::Role;

/// Connections taken that are open now.
pub const CONNECTIONS: &str = "torchfs_rpc_connections";
/// Requests taken.
pub const REQUESTS: &str = "torchfs_rpc_requests_total";
/// Requests cancelled by their caller before the answer was ready.
pub const CANCELLED: &str = "torchfs_rpc_cancelled_total";
/// Requests dropped because their deadline passed before the answer was ready.
pub const EXPIRED: &str = "torchfs_rpc_expired_total";
/// Connections closed because the peer sent bytes that are no frames.
pub const GARBAGE: &str = "torchfs_rpc_garbage_total";
/// Connections refused in the handshake, or because there are too many.
pub const REFUSED: &str = "torchfs_rpc_refused_total";
/// Connections closed because the peer was silent, or did not take or finish its frames in time.
pub const STALLED: &str = "torchfs_rpc_stalled_total";
/// Times a reader stopped because too much was in flight.
pub const PAUSED: &str = "torchfs_rpc_paused_total";

/// Seconds from the arrival of a request, which is when its first bytes were read from the socket, to the start of its execution.
pub const START: &str = "torchfs_rpc_start_seconds";
/// Seconds from the arrival of a request to the moment when the socket had taken all of its answer.
pub const ANSWER: &str = "torchfs_rpc_answer_seconds";
/// Seconds from a call, by the role that is called, to the moment when the socket had taken all of its request.
pub const SEND: &str = "torchfs_rpc_send_seconds";

/// Says what the figures mean; call once when an exporter is there.
pub fn describe() {
    metrics::describe_gauge!(CONNECTIONS, "Connections taken that are open now");
    metrics::describe_counter!(REQUESTS, "Requests taken");
    metrics::describe_counter!(CANCELLED, "Requests cancelled by their caller before the answer was ready");
    metrics::describe_counter!(
        EXPIRED,
        "Requests dropped because their deadline passed before the answer was ready"
    );
    metrics::describe_counter!(GARBAGE, "Connections closed because the peer sent bytes that are no frames");
    metrics::describe_counter!(
        REFUSED,
        "Connections refused in the handshake, or because there are too many"
    );
    metrics::describe_counter!(
        STALLED,
        "Connections closed because the peer was silent, or did not take or finish its frames in time"
    );
    metrics::describe_counter!(PAUSED, "Times a reader stopped because too much was in flight");
    metrics::describe_histogram!(
        START,
        "Seconds from the arrival of a request, which is when its first bytes were read from the socket, to the start of its execution"
    );
    metrics::describe_histogram!(
        ANSWER,
        "Seconds from the arrival of a request to the moment when the socket had taken all of its answer"
    );
    metrics::describe_histogram!(
        SEND,
        "Seconds from a call, by the role that is called, to the moment when the socket had taken all of its request"
    );
}

/// How long calls to this role wait for the socket.
pub(crate) fn send_wait(role: Role) -> Histogram {
    let to = match role {
        Role::Agent => "agent",
        Role::Meta => "meta",
        Role::Data => "data",
        Role::Tool => "tool",
    };
    histogram!(SEND, "to" => to)
}

/// The handles of one listener.
#[derive(Clone)]
pub(crate) struct ServerMetrics {
    pub connections: Gauge,
    pub requests: Counter,
    pub cancelled: Counter,
    pub expired: Counter,
    pub garbage: Counter,
    pub refused: Counter,
    pub stalled: Counter,
    pub paused: Counter,
    pub start: Histogram,
    pub answer: Histogram,
}

impl ServerMetrics {
    pub fn new() -> ServerMetrics {
        ServerMetrics {
            connections: gauge!(CONNECTIONS),
            requests: counter!(REQUESTS),
            cancelled: counter!(CANCELLED),
            expired: counter!(EXPIRED),
            garbage: counter!(GARBAGE),
            refused: counter!(REFUSED),
            stalled: counter!(STALLED),
            paused: counter!(PAUSED),
            start: histogram!(START),
            answer: histogram!(ANSWER),
        }
    }
}
