//! The scrub: every server reads and checks what it stores, a part at a time; what is bad is pulled again. At the end all groups
//! are marked, so that a pass looks for what is not there at all.
//!
//! How far it is on each server is written down now and then, so a restart goes on from there.

use std::time::Duration;

use futures_util::future::join_all;
use torchfs_proto::msg::meta::BadPiece;
use torchfs_proto::record::{self, Scrub};
use torchfs_proto::{Result, ServerId, key};

use super::{PieceAt, RepairPeers, ScrubPart, Scrubbed};
use crate::server::within;
use crate::service::{Meta, State};

/// Pieces that a server reads in one step.
const STEP: u32 = 64;

impl Meta {
    /// One step on every server that is not done. Answers whether a scrub runs.
    pub async fn scrub(&self, peers: &dyn RepairPeers) -> bool {
        let (parts, rate) = {
            let state = self.state.lock();
            let Some(scrub) = &state.repairs.settings.scrub else { return false };
            let after = |server: &ServerId| {
                scrub.cursors.iter().find(|(id, _, _)| id == server).map(|(_, block, piece)| (*block, *piece))
            };
            let parts: Vec<(ServerId, String, Option<PieceAt>)> = state
                .members
                .addresses()
                .into_iter()
                .filter(|(server, _)| !scrub.done.contains(server))
                .map(|(server, addr)| (server, addr, after(&server)))
                .collect();
            (parts, self.repair_rate(&state))
        };
        let slow = Duration::from_secs((u64::from(STEP) * (16 << 20)).checked_div(rate).unwrap_or(0));
        let limit = Duration::from_millis(u64::from(self.config.pull_timeout_ms)) + slow;
        let calls = parts.into_iter().map(|(server, addr, after)| async move {
            let part = ScrubPart { after, pieces: STEP, rate };
            (server, within(limit, peers.scrub(&addr, part, limit)).await)
        });
        let answers = join_all(calls).await;
        let mut state = self.state.lock();
        if let Err(fault) = self.scrubbed(&mut state, answers) {
            tracing::warn!("the scrub cannot be noted: {fault}");
        }
        true
    }

    /// Begins a scrub, or stops it. One that runs goes on.
    pub(crate) fn set_scrub(&self, state: &mut State, on: bool) -> Result<()> {
        let mut settings = state.repairs.settings.clone();
        settings.scrub = match (on, settings.scrub.take()) {
            (false, _) => None,
            (true, Some(scrub)) => Some(scrub),
            (true, None) => Some(Scrub {
                began: torchfs_proto::attr::Time::from_ns(self.clock.wall_ns()),
                cursors: Vec::new(),
                done: Vec::new(),
                pieces: 0,
                bytes: 0,
                bad: 0,
            }),
        };
        self.set_repair(state, settings)
    }

    /// Writes the settings of repair down.
    pub(crate) fn set_repair(&self, state: &mut State, settings: record::Repair) -> Result<()> {
        let now = self.clock.now();
        let mut view = self.view(key::CLUSTER);
        view.frees = true;
        view.put(key::repair(), &settings);
        self.order(state, view, now)?;
        state.repairs.settings = settings;
        state.repairs.scrub_saved = Some(now);
        Ok(())
    }

    fn scrubbed(&self, state: &mut State, answers: Vec<(ServerId, Result<Scrubbed>)>) -> Result<()> {
        let now = self.clock.now();
        let Some(mut scrub) = state.repairs.settings.scrub.clone() else { return Ok(()) };
        let mut bad = Vec::new();
        for (server, answer) in answers {
            match answer {
                Ok(part) => {
                    scrub.pieces += part.pieces;
                    scrub.bytes += part.bytes;
                    scrub.bad += part.bad.len() as u64;
                    bad.extend(part.bad.iter().map(|(block, piece)| BadPiece {
                        block: *block,
                        piece: *piece,
                        server,
                    }));
                    scrub.cursors.retain(|(id, _, _)| *id != server);
                    match part.after {
                        Some((block, piece)) => scrub.cursors.push((server, block, piece)),
                        None => scrub.done.push(server),
                    }
                }
                Err(fault) => tracing::debug!(server = server.0, "the scrub waits: {fault}"),
            }
        }
        let heard = state.members.addresses();
        let ended = !heard.is_empty() && heard.keys().all(|server| scrub.done.contains(server));
        let mut settings = state.repairs.settings.clone();
        if ended {
            tracing::info!(pieces = scrub.pieces, bad = scrub.bad, "every piece was read and checked");
            settings.scrubbed = Some(torchfs_proto::attr::Time::from_ns(self.clock.wall_ns()));
            settings.scrub = None;
            settings.last = Some(Scrub { cursors: Vec::new(), done: Vec::new(), ..scrub });
        } else {
            settings.scrub = Some(scrub);
        }
        let every = Duration::from_millis(u64::from(self.config.scrub_save_ms));
        if ended || state.repairs.scrub_saved.is_none_or(|saved| now >= saved + every) {
            self.set_repair(state, settings)?;
        } else {
            state.repairs.settings = settings;
        }
        self.report_bad(state, &bad, now)?;
        if ended {
            self.edit_members(state, now, |table, _| {
                table.mark_all_dirty();
                Ok(())
            })?;
        }
        Ok(())
    }
}
