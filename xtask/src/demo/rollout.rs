//! The third part of the demo: the Pods of a CloneSet get a new image and stay the same Pods.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::apply;
use super::screen::Screen;
use super::watch::{Container, container, ready, watch};
use testbed::cluster::Node;

/// The image that the Pods get, and how many MiB the stand-in has that the bed serves under this name.
pub const NEXT: (&str, usize) = ("library/busybox:1.37", 4);
/// The image as users write it.
const IMAGE: &str = "busybox:1.37";
/// How long a step may take.
const BOUND: Duration = Duration::from_secs(120);

/// A Pod as far as a rollout may not change it, and its container.
#[derive(Debug)]
struct Seen {
    uid: String,
    address: String,
    container: Container,
}

/// Makes the example CloneSet, changes its image, and shows what becomes of the Pods.
pub fn show(screen: &mut Screen, node: &Node) -> Result<()> {
    apply(screen, node, "cloneset.yaml")?;
    let before = all_ready(node)?;
    for (name, seen) in &before {
        screen.line(&format!(
            "  {name}  {}  container {}, Ready",
            seen.address,
            seen.container.short()
        ))?;
    }
    screen.line("")?;

    let (events_tx, events_rx) = channel();
    let mut watching = watch(node, &["pods", "-l", "app=web", "--watch-only"], events_tx)?;
    let start = change_image(screen, node)?;
    let outcome = follow(screen, &events_rx, start, &before);
    watching.kill().ok();
    watching.wait()?;
    outcome?;
    same_pods(&before, &all_ready(node)?)?;
    screen.line("  the same Pods, the same addresses, one restart of their container each")?;
    screen.line("")
}

/// Waits for the set to say that all its Pods are available, and gives them by name.
fn all_ready(node: &Node) -> Result<BTreeMap<String, Seen>> {
    let wait = ["--for=condition=Ready", "--timeout=60s"];
    let count = r#"--for=jsonpath={.status.updatedAvailableReplicas}=3"#;
    node.plane
        .kubectl(&["wait", "cloneset/web", count, "--timeout=60s"])?;
    node.plane
        .kubectl(&[["wait", "pods", "-l", "app=web"].as_slice(), &wait].concat())?;
    let pods = node
        .plane
        .kubectl(&["get", "pods", "-l", "app=web", "-o", "json"])?;
    let pods: Value = serde_json::from_str(&pods)?;
    let pods = pods["items"].as_array().context("no list of Pods")?;
    Ok(pods.iter().map(|pod| (name(pod), seen(pod))).collect())
}

fn name(pod: &Value) -> String {
    pod["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

fn seen(pod: &Value) -> Seen {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Seen {
        uid: text(&pod["metadata"]["uid"]),
        address: text(&pod["status"]["podIP"]),
        container: container(pod),
    }
}

fn change_image(screen: &mut Screen, node: &Node) -> Result<Instant> {
    let patch =
        format!(r#"[{{"op":"replace","path":"/spec/template/spec/containers/0/image","value":"{IMAGE}"}}]"#);
    screen.command(&format!("kubectl patch cloneset web --type=json -p '{patch}'"))?;
    let start = Instant::now();
    node.plane
        .kubectl(&["patch", "cloneset", "web", "--type=json", "-p", &patch])?;
    Ok(start)
}

/// Prints what happens to each Pod until all run the new image.
fn follow(
    screen: &mut Screen,
    events: &Receiver<Value>,
    start: Instant,
    before: &BTreeMap<String, Seen>,
) -> Result<()> {
    let mut last: BTreeMap<String, Step> = BTreeMap::new();
    while start.elapsed() < BOUND {
        let Ok(pod) = events.recv_timeout(Duration::from_secs(1)) else {
            continue;
        };
        let name = name(&pod);
        let was = before.get(&name);
        let was = was.with_context(|| format!("Pod {name} is none of those that were there"))?;
        let step = step(&pod, &was.container);
        let passed = last.get(&name).copied().unwrap_or(Step::Before);
        if step > passed {
            let seconds = start.elapsed().as_secs_f64();
            screen.line(&format!("  {seconds:6.2} s  {name}  {}", told(step, &pod, was)))?;
            last.insert(name, step);
        }
        if last.len() == before.len() && last.values().all(|step| *step == Step::After) {
            return screen.line("");
        }
    }
    bail!("the Pods did not all run {IMAGE} within {BOUND:?}; they came to {last:?}")
}

/// How far a Pod is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Before,
    Asked,
    After,
}

fn step(pod: &Value, was: &Container) -> Step {
    let now = container(pod);
    if pod["spec"]["containers"][0]["image"] != IMAGE {
        return Step::Before;
    }
    if now.id != was.id && now.state == "running" && ready(pod) {
        return Step::After;
    }
    Step::Asked
}

fn told(step: Step, pod: &Value, was: &Seen) -> String {
    match step {
        Step::Before | Step::Asked => format!("out of service, to run {IMAGE}"),
        Step::After => {
            let now = container(pod);
            format!(
                "container {} -> {}, Ready again",
                was.container.short(),
                now.short()
            )
        }
    }
}

fn same_pods(before: &BTreeMap<String, Seen>, after: &BTreeMap<String, Seen>) -> Result<()> {
    let stable = |pods: &BTreeMap<String, Seen>| -> Vec<(String, String, String)> {
        pods.iter()
            .map(|(name, seen)| (name.clone(), seen.uid.clone(), seen.address.clone()))
            .collect()
    };
    ensure!(
        stable(before) == stable(after),
        "Pods were replaced: before {before:?}, after {after:?}"
    );
    let once = after.values().all(|seen| seen.container.restarts == 1);
    ensure!(once, "not every container was restarted just once: {after:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_goes_from_asked_to_ready_with_another_container() {
        let pod = |image: &str, id: &str, ready: &str| {
            json!({
                "spec": { "containers": [{ "image": image }] },
                "status": {
                    "conditions": [{ "type": "Ready", "status": ready }],
                    "containerStatuses": [{ "containerID": id, "state": { "running": {} } }],
                },
            })
        };
        let was = container(&pod("busybox:1.36", "containerd://a", "True"));
        assert_eq!(
            step(&pod("busybox:1.36", "containerd://a", "True"), &was),
            Step::Before
        );
        assert_eq!(step(&pod(IMAGE, "containerd://a", "False"), &was), Step::Asked);
        assert_eq!(step(&pod(IMAGE, "containerd://b", "False"), &was), Step::Asked);
        assert_eq!(step(&pod(IMAGE, "containerd://b", "True"), &was), Step::After);
    }
}
