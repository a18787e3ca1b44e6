//! The first part of the demo: an ImagePullJob, with the byte progress from the daemon's control API.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::screen::Screen;
use super::{MEBIBITS_PER_SECOND, PULLED_IMAGE, apply, spawn_with_output};
use testbed::cluster::Node;

/// Timeout of the job.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Applies the example job and shows the pull until it has succeeded.
pub fn show(screen: &mut Screen, node: &Node) -> Result<()> {
    let before = node.runtime.ctr(&["images", "list", "--quiet"])?;
    ensure!(
        !before.contains(PULLED_IMAGE.0),
        "{} is on the node already",
        PULLED_IMAGE.0
    );
    node.runtime.limit_bandwidth(MEBIBITS_PER_SECOND)?;
    let (mut watch, status) = watch_daemon_status(node, "daemonset/kruise-daemon")?;
    let start = apply(screen, node, "imagepulljob.yaml")?;
    let result = show_progress(screen, node, &status, start);
    watch.kill().ok();
    watch.wait()?;
    node.runtime.remove_bandwidth_limit()?;
    result?;
    let after = node.runtime.ctr(&["images", "list", "--quiet"])?;
    ensure!(
        after.contains(PULLED_IMAGE.0),
        "the job succeeded but {} is not on the node",
        PULLED_IMAGE.0
    );
    Ok(())
}

/// A daemon's own live status, as any user of the node can get it.
pub fn watch_daemon_status(node: &Node, daemon: &str) -> Result<(Child, Receiver<Value>)> {
    let mut kubectl = node.plane.kubectl_command();
    kubectl.args(["exec", "-i", "-n", "kruise-system", daemon, "--"]);
    kubectl.args(["/kruise-daemon", "status", "--watch", "--output", "json"]);
    let (child, output) = spawn_with_output(&kubectl)?;
    let (status_tx, status_rx) = channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let Ok(status) = serde_json::from_str(&line) else {
                continue;
            };
            if status_tx.send(status).is_err() {
                break;
            }
        }
    });
    Ok((child, status_rx))
}

fn show_progress(screen: &mut Screen, node: &Node, status: &Receiver<Value>, start: Instant) -> Result<()> {
    let bar = screen.byte_progress_bar();
    let mut shown = 0;
    while start.elapsed() < TIMEOUT {
        if let Ok(now) = status.recv_timeout(Duration::from_millis(200))
            && let Some((done, total)) = pull_progress(&now)
        {
            bar.set_length(total);
            bar.set_position(done);
            let tenths = done * 10 / total.max(1);
            if tenths > shown {
                shown = tenths;
                bar.suspend(|| screen.line(&progress_line(start, done, total)))?;
            }
            continue;
        }
        let job: Value =
            serde_json::from_str(
                &node
                    .plane
                    .kubectl(&["get", "imagepulljob", "nginx", "-o", "json"])?,
            )?;
        let count = |field: &str| job["status"][field].as_i64().unwrap_or_default();
        if job["status"]["completionTime"].is_string() {
            bar.finish_and_clear();
            let (succeeded, desired) = (count("succeeded"), count("desired"));
            ensure!(
                succeeded == desired && desired > 0,
                "the job ended with {}",
                job["status"]
            );
            let seconds = start.elapsed().as_secs_f64();
            screen.line(&format!(
                "  {seconds:6.2} s  Succeeded on {succeeded} of {desired} nodes"
            ))?;
            return screen.line("");
        }
    }
    let job = node
        .plane
        .kubectl(&["get", "imagepulljob,nodeimage", "-o", "yaml"])?;
    bail!("the job did not end within {TIMEOUT:?}:\n{job}")
}

/// Bytes done and total of the image's pull.
pub fn pull_progress(status: &Value) -> Option<(u64, u64)> {
    let pulls = status["pulls"].as_array()?;
    let pull = pulls
        .iter()
        .find(|p| p["image"].as_str().is_some_and(|i| i.contains("nginx")))?;
    let total = pull["bytesTotal"].as_u64().filter(|t| *t > 0)?;
    Some((pull["bytesDone"].as_u64()?.min(total), total))
}

fn progress_line(start: Instant, done: u64, total: u64) -> String {
    let percent = done * 100 / total.max(1);
    let filled = usize::try_from(percent / 5).unwrap_or(20);
    let (filled_cells, empty_cells) = ("#".repeat(filled), ".".repeat(20 - filled));
    let seconds = start.elapsed().as_secs_f64();
    format!(
        "  {seconds:6.2} s  [{filled_cells}{empty_cells}] {percent:>3}%  {:.1} of {:.1} MiB",
        mebibytes(done),
        mebibytes(total)
    )
}

/// Bytes as mebibytes.
pub fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / 1_048_576.0
}
