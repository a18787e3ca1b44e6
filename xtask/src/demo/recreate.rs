//! The second part of the demo: a ContainerRecreateRequest, and its timeline.

use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::apply;
use super::screen::Screen;
use super::watch::{ContainerSnapshot, first_container, pod_is_ready, watch_objects};
use testbed::cluster::Node;

/// Timeout of the request.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Runs the example Pod, requests the recreation of its container, and shows the timeline.
pub fn show(screen: &mut Screen, node: &Node) -> Result<()> {
    apply(screen, node, "pod.yaml")?;
    node.plane
        .kubectl(&["wait", "pod/hello", "--for=condition=Ready", "--timeout=60s"])?;
    let before = first_container(&pod(node)?);
    screen.line(&format!(
        "  container {} runs, restarts {}",
        before.short_id(),
        before.restarts
    ))?;
    screen.line("")?;

    let (events_tx, events_rx) = channel();
    let mut watches = [
        watch_objects(node, &["pod", "hello", "--watch-only"], events_tx.clone())?,
        watch_objects(node, &["containerrecreaterequests", "--watch-only"], events_tx)?,
    ];
    let start = apply(screen, node, "containerrecreaterequest.yaml")?;
    let result = show_events(screen, &events_rx, start, &before);
    for watch in &mut watches {
        watch.kill().ok();
        watch.wait()?;
    }
    result?;
    let after = first_container(&pod(node)?);
    screen.line(&format!(
        "  container {} -> {}",
        before.short_id(),
        after.short_id()
    ))?;
    screen.line(&format!(
        "  restarts {} -> {}; the same Pod, the same address",
        before.restarts, after.restarts
    ))?;
    screen.line("")
}

fn pod(node: &Node) -> Result<Value> {
    Ok(serde_json::from_str(
        &node.plane.kubectl(&["get", "pod", "hello", "-o", "json"])?,
    )?)
}

fn show_events(
    screen: &mut Screen,
    events: &Receiver<Value>,
    start: Instant,
    before: &ContainerSnapshot,
) -> Result<()> {
    let mut last = [
        format!("container {} {}", before.short_id(), before.state),
        String::new(),
    ];
    // There are two watches, and the events of one may come before those of the other.
    let (mut completed, mut pod_ready) = (false, false);
    while start.elapsed() < TIMEOUT {
        let Ok(object) = events.recv_timeout(Duration::from_secs(1)) else {
            continue;
        };
        let request = object["kind"] == "ContainerRecreateRequest";
        let text = if request {
            request_line(&object)
        } else {
            pod_line(&object)
        };
        let last_line = &mut last[usize::from(request)];
        if *last_line != text && !text.is_empty() {
            screen.line(&format!("  {:6.2} s  {text}", start.elapsed().as_secs_f64()))?;
            *last_line = text;
        }
        if !request {
            pod_ready = pod_is_ready(&object) && first_container(&object).short_id() != before.short_id();
        } else if let Some("Completed" | "Failed") = object["status"]["phase"].as_str() {
            ensure!(
                all_recreated(&object),
                "the request ended with {}",
                object["status"]
            );
            completed = true;
        }
        if completed && pod_ready {
            return screen.line("");
        }
    }
    bail!("the request did not end, or the Pod was not ready again, within {TIMEOUT:?}")
}

/// Whether every container of a finished request was recreated.
fn all_recreated(request: &Value) -> bool {
    let states = request["status"]["containerRecreateStates"].as_array();
    states.is_some_and(|all| !all.is_empty() && all.iter().all(|s| s["phase"] == "Succeeded"))
}

fn request_line(request: &Value) -> String {
    let phase = request["status"]["phase"].as_str().unwrap_or("created");
    let states = request["status"]["containerRecreateStates"].as_array();
    let states: Vec<String> = states
        .into_iter()
        .flatten()
        .map(|s| {
            let field_text = |field: &str| s[field].as_str().unwrap_or_default();
            let note = if field_text("message").is_empty() {
                String::new()
            } else {
                format!(" ({})", field_text("message"))
            };
            format!("{} {}{note}", field_text("name"), field_text("phase"))
        })
        .collect();
    let detail = if states.is_empty() {
        String::new()
    } else {
        format!(": {}", states.join("; "))
    };
    format!("request   {phase}{detail}")
}

fn pod_line(pod: &Value) -> String {
    let now = first_container(pod);
    let ready = if pod_is_ready(pod) && now.state == "running" {
        ", Pod Ready"
    } else {
        ""
    };
    format!("container {} {}{ready}", now.short_id(), now.state)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn request_line_shows_phase_and_message() {
        let request = |phase: &str, message: &str| {
            json!({ "status": { "phase": phase, "containerRecreateStates": [
                { "name": "app", "phase": phase, "isKilled": true, "message": message } ] } })
        };
        assert_eq!(request_line(&json!({})), "request   created");
        assert_eq!(
            request_line(&request("Recreating", "TERM sent")),
            "request   Recreating: app Recreating (TERM sent)"
        );
        assert!(all_recreated(&request("Succeeded", "")));
        assert!(!all_recreated(&request("Failed", "no luck")));
        assert!(!all_recreated(&json!({ "status": { "phase": "Completed" } })));
    }
}
