//! What many Pods cost: writes to each, and the manager's own time and memory.

use std::fs;
use std::time::Instant;

use serde_json::json;

use crate::field::Field;
use crate::world::World;

const PODS: usize = 300;

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
    let mut manager = world.manager("kruise-manager");
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
    field.image("web", "example.com/app:2").await;
    field.settled("web").await;
    step("updated in place", 3 * PODS);
    field.edit("web", json!({ "spec": { "replicas": 0 } })).await;
    field.until_pods("web", "gone", |pods| pods.is_empty()).await;
    step("deleted", PODS);
    // How many there are depends on how busy the machine is; what must not be is one a Pod.
    for resource in ["clonesets/status", "events"] {
        let writes = field.writes().iter().filter(|w| w.1 == resource).count();
        assert!(writes < PODS, "{writes} writes of {resource}");
    }
}
