//! Starts the processes of a test run on its behalf; see `torchfs_tests::nursery` for why.
//!
//! Reads one JSON request a line, answers with one JSON line each. When its input ends, so do the processes it started.
#![allow(clippy::unwrap_used)] // a fault here is a fault of the tests

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{BufRead, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

fn main() {
    let mut children: HashMap<u64, Child> = HashMap::new();
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let answer = match request["pid"].as_u64() {
            Some(pid) => match children.get_mut(&pid).map(Child::try_wait) {
                Some(Ok(Some(status))) => json!({"status": status.into_raw()}),
                Some(Ok(None)) => json!({}),
                Some(Err(error)) => json!({"error": error.to_string()}),
                None => json!({"error": format!("there is no process {pid} here")}),
            },
            None => match start(&request) {
                Ok(child) => {
                    let pid = u64::from(child.id());
                    children.insert(pid, child);
                    json!({"pid": pid})
                }
                Err(error) => json!({"error": error.to_string()}),
            },
        };
        writeln!(out, "{answer}").unwrap();
        out.flush().unwrap();
    }
    for child in children.values_mut() {
        let _ = child.kill();
    }
}

fn start(request: &Value) -> std::io::Result<Child> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let file = |value: &Value| OpenOptions::new().create(true).append(true).open(text(value));
    let mut command = Command::new(text(&request["program"]));
    command.args(request["args"].as_array().unwrap().iter().map(text));
    for pair in request["env"].as_array().unwrap() {
        match pair[1].as_str() {
            Some(value) => command.env(text(&pair[0]), value),
            None => command.env_remove(text(&pair[0])),
        };
    }
    if let Some(folder) = request["folder"].as_str() {
        command.current_dir(folder);
    }
    command.stdin(Stdio::null()).stdout(file(&request["out"])?).stderr(file(&request["err"])?);
    // A group of its own, so that a Ctrl-C at the tests does not look like a failure of the product.
    command.process_group(0).spawn()
}
