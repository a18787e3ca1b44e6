//! What many Pods cost: writes to each, and the manager's own time and memory.

use std::fs;
use std::time::Instant;

use serde_json::{Value, json};

use crate::field::Field;
use crate::manager::Manager;
use crate::world::{World, world};

const PODS: usize = 300;
/// More events than these are not written of a CloneSet in a few minutes, whatever becomes of it.
const EVENTS: usize = 40;

/// Seconds of processor time that a process has had, and its resident memory in MB.
fn footprint(pid: i32) -> (f64, u64) {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    let kilobytes: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    (ticks / 100.0, kilobytes / 1024)
}

#[tokio::test]
async fn two_writes_make_a_pod_and_three_update_it_in_place() {
    let world: &'static World = Box::leak(Box::new(World::new()));
    let mut manager = Manager::unelected(&world.plane, "kruise-manager");
    manager.start().unwrap();
    let pid = manager.pid().unwrap().as_raw();
    let field = Field::new(world, "many").await;
    let mut last = (Instant::now(), 0, footprint(pid).0);
    let mut step = |what: &str, most: usize| {
        let writes = field.pod_writes().len();
        let (cpu, memory) = footprint(pid);
        let (began, before, spent) = last;
        let (took, used) = (began.elapsed(), cpu - spent);
        println!(
            "{what}: {took:.1?}, {} writes to Pods, {used:.2} s, {memory} MB",
            writes - before
        );
        assert!(
            writes - before <= most,
            "{what}: {} writes to {PODS} Pods",
            writes - before
        );
        last = (Instant::now(), writes, cpu);
    };
    field.set("web", json!({ "replicas": PODS })).await;
    field.settled("web").await;
    step("made", 2 * PODS);
    let templates = || {
        let dry_runs = field.dry_runs().into_iter();
        dry_runs
            .filter(|((_, resource, _), _)| resource == "podtemplates")
            .count()
    };
    let checked = templates();
    field.image("web", "example.com/app:2").await;
    field.settled("web").await;
    step("updated in place", 3 * PODS);
    field.image("web", "example.com/app:3").await;
    field.settled("web").await;
    step("updated in place again", 3 * PODS);
    // The API server may ask a webhook twice where it wrote meanwhile.
    assert!(
        templates() <= checked + 3,
        "the webhook alone asks about another image"
    );
    field.edit("web", json!({ "spec": { "replicas": 0 } })).await;
    field.until_pods("web", "gone", |pods| pods.is_empty()).await;
    step("deleted", PODS);
    let refused: Vec<_> = field
        .asked()
        .into_iter()
        .filter(|((_, resource, _), code)| resource.starts_with("pods") && *code >= 300)
        .collect();
    assert!(refused.len() < PODS / 10, "asked in vain: {refused:?}");
    let dry = field.dry_runs();
    println!("{} dry runs", dry.len());
    assert!(dry.len() < PODS / 10, "tried without need: {dry:?}");
    // How many there are depends on how busy the machine is; what must not be is one a Pod.
    for (resource, most) in [("clonesets/status", PODS), ("events", EVENTS)] {
        let writes = field.writes().iter().filter(|w| w.1 == resource).count();
        assert!(writes < most, "{writes} writes of {resource}");
    }
}

/// Each Pod is an event of its own, and of many there are the first, and then one for all.
#[tokio::test]
async fn a_rollout_one_by_one_tells_few_events() {
    let field = Field::new(world(), "one-by-one").await;
    let rolling = json!({ "rollingUpdate": { "maxUnavailable": 1 } });
    let spec = json!({ "replicas": 40, "updateStrategy": rolling, "scaleStrategy": { "maxUnavailable": 5 } });
    field.set("web", spec).await;
    field.settled("web").await;
    field.image("web", "example.com/app:2").await;
    field.settled("web").await;
    let writes = field.writes().into_iter().filter(|w| w.1 == "events").count();
    assert!(writes < EVENTS, "{writes} writes of events");
    let events = field
        .api("", "v1", "Event")
        .list(&Default::default())
        .await
        .unwrap();
    let of_update = events.items.iter().map(|event| json!(event));
    let of_update = of_update.filter(|event| event["reason"] == "SuccessfulUpdatePodInPlace");
    let told: Vec<Value> = of_update.collect();
    assert!((5..=11).contains(&told.len()), "{told:#?}");
}
