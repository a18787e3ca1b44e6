//! The first part of the demo: an ImagePullJob, with the bytes as the daemon's control API tells them.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::screen::Screen;
use super::{MEBIBITS_PER_SECOND, PULLED, apply, printing};
use testbed::cluster::Node;

/// How long the job may take.
const BOUND: Duration = Duration::from_secs(120);

/// Applies the example job and shows the pull until it succeeded.
pub fn show(screen: &mut Screen, node: &Node) -> Result<()> {
    let before = node.runtime.ctr(&["images", "list", "--quiet"])?;
    ensure!(!before.contains(PULLED.0), "{} is on the node already", PULLED.0);
    node.runtime.limit_bandwidth(MEBIBITS_PER_SECOND)?;
    let (mut watch, status) = watch(node)?;
    let start = apply(screen, node, "imagepulljob.yaml")?;
    let outcome = follow(screen, node, &status, start);
    watch.kill().ok();
    watch.wait()?;
    node.runtime.unlimit_bandwidth()?;
    outcome?;
    let after = node.runtime.ctr(&["images", "list", "--quiet"])?;
    ensure!(
        after.contains(PULLED.0),
        "the job succeeded but {} is not on the node",
        PULLED.0
    );
    Ok(())
}

/// The daemon's own live status, as anyone can have it on a node.
fn watch(node: &Node) -> Result<(Child, Receiver<Value>)> {
    let mut kubectl = node.plane.kubectl_command();
    kubectl.args([
        "exec",
        "-i",
        "-n",
        "kruise-system",
        "daemonset/kruise-daemon",
        "--",
    ]);
    kubectl.args(["/kruise-daemon", "status", "--watch", "--output", "json"]);
    let (child, output) = printing(&kubectl)?;
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

fn follow(screen: &mut Screen, node: &Node, status: &Receiver<Value>, start: Instant) -> Result<()> {
    let bar = screen.bytes();
    let mut shown = 0;
    while start.elapsed() < BOUND {
        if let Ok(now) = status.recv_timeout(Duration::from_millis(200))
            && let Some((done, total)) = bytes(&now)
        {
            bar.set_length(total);
            bar.set_position(done);
            let tenths = done * 10 / total.max(1);
            if tenths > shown {
                shown = tenths;
                bar.suspend(|| screen.line(&line(start, done, total)))?;
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
    bail!("the job did not end within {BOUND:?}:\n{job}")
}

/// Bytes done and in all of the image's pull.
fn bytes(status: &Value) -> Option<(u64, u64)> {
    let pulls = status["pulls"].as_array()?;
    let pull = pulls
        .iter()
        .find(|p| p["image"].as_str().is_some_and(|i| i.contains("nginx")))?;
    let total = pull["bytesTotal"].as_u64().filter(|t| *t > 0)?;
    Some((pull["bytesDone"].as_u64()?.min(total), total))
}

fn line(start: Instant, done: u64, total: u64) -> String {
    let percent = done * 100 / total.max(1);
    let filled = usize::try_from(percent / 5).unwrap_or(20);
    let (full, rest) = ("#".repeat(filled), ".".repeat(20 - filled));
    let mebibytes = |bytes: u64| bytes as f64 / 1_048_576.0;
    let seconds = start.elapsed().as_secs_f64();
    format!(
        "  {seconds:6.2} s  [{full}{rest}] {percent:>3}%  {:.1} of {:.1} MiB",
        mebibytes(done),
        mebibytes(total)
    )
}
