//! The second part of the demo: a ContainerRecreateRequest, and what happened when.

use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::apply;
use super::screen::Screen;
use super::watch::{Container, container, ready, watch};
use testbed::cluster::Node;

/// How long the request may take.
const BOUND: Duration = Duration::from_secs(120);

/// Runs the example Pod, asks for a new container in it, and shows the time line.
pub fn show(screen: &mut Screen, node: &Node) -> Result<()> {
    apply(screen, node, "pod.yaml")?;
    node.plane
        .kubectl(&["wait", "pod/hello", "--for=condition=Ready", "--timeout=60s"])?;
    let before = container(&pod(node)?);
    screen.line(&format!(
        "  container {} runs, restarts {}",
        before.short(),
        before.restarts
    ))?;
    screen.line("")?;

    let (events_tx, events_rx) = channel();
    let mut watches = [
        watch(node, &["pod", "hello", "--watch-only"], events_tx.clone())?,
        watch(node, &["containerrecreaterequests", "--watch-only"], events_tx)?,
    ];
    let start = apply(screen, node, "containerrecreaterequest.yaml")?;
    let outcome = follow(screen, &events_rx, start, &before);
    for watch in &mut watches {
        watch.kill().ok();
        watch.wait()?;
    }
    outcome?;
    let after = container(&pod(node)?);
    screen.line(&format!("  container {} -> {}", before.short(), after.short()))?;
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

fn follow(screen: &mut Screen, events: &Receiver<Value>, start: Instant, before: &Container) -> Result<()> {
    let mut last = [
        format!("container {} {}", before.short(), before.state),
        String::new(),
    ];
    // The two are watched apart, and the news of one may come before that of the other.
    let (mut completed, mut back) = (false, false);
    while start.elapsed() < BOUND {
        let Ok(object) = events.recv_timeout(Duration::from_secs(1)) else {
            continue;
        };
        let request = object["kind"] == "ContainerRecreateRequest";
        let text = if request {
            request_line(&object)
        } else {
            pod_line(&object)
        };
        let place = &mut last[usize::from(request)];
        if *place != text && !text.is_empty() {
            screen.line(&format!("  {:6.2} s  {text}", start.elapsed().as_secs_f64()))?;
            *place = text;
        }
        if !request {
            back = ready(&object) && container(&object).short() != before.short();
        } else if let Some("Completed" | "Failed") = object["status"]["phase"].as_str() {
            ensure!(succeeded(&object), "the request ended with {}", object["status"]);
            completed = true;
        }
        if completed && back {
            return screen.line("");
        }
    }
    bail!("the request did not end, or the Pod was not ready again, within {BOUND:?}")
}

/// Whether every container of a request that is over was recreated.
fn succeeded(request: &Value) -> bool {
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
            let word = |field: &str| s[field].as_str().unwrap_or_default();
            let note = if word("message").is_empty() {
                String::new()
            } else {
                format!(" ({})", word("message"))
            };
            format!("{} {}{note}", word("name"), word("phase"))
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
    let now = container(pod);
    let ready = if ready(pod) && now.state == "running" {
        ", Pod Ready"
    } else {
        ""
    };
    format!("container {} {}{ready}", now.short(), now.state)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_request_is_told_in_a_line() {
        let request = |phase: &str, message: &str| {
            json!({ "status": { "phase": phase, "containerRecreateStates": [
                { "name": "app", "phase": phase, "isKilled": true, "message": message } ] } })
        };
        assert_eq!(request_line(&json!({})), "request   created");
        assert_eq!(
            request_line(&request("Recreating", "TERM sent")),
            "request   Recreating: app Recreating (TERM sent)"
        );
        assert!(succeeded(&request("Succeeded", "")));
        assert!(!succeeded(&request("Failed", "no luck")));
        assert!(!succeeded(&json!({ "status": { "phase": "Completed" } })));
    }
}
