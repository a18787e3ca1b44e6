//! What many Pods cost: writes to each, and the manager's CPU time and memory.

use std::fs;
use std::time::Instant;

use serde_json::{Value, json};

use crate::fixture::Fixture;
use crate::manager::Manager;
use crate::test_cluster::{TestCluster, shared_cluster};

const PODS: usize = 100;
/// Maximum number of events of one CloneSet in a few minutes, whatever happens to it.
const MAX_EVENTS: usize = 40;

/// CPU seconds of a process, and its resident memory in MB.
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
async fn pod_costs_two_writes_and_in_place_update_three() {
    let cluster: &'static TestCluster = Box::leak(Box::new(TestCluster::new()));
    let mut manager = Manager::unelected(&cluster.plane, "kruise-manager");
    manager.start().unwrap();
    let pid = manager.pid().unwrap().as_raw();
    let fixture = Fixture::new(cluster, "many").await;
    let began = Instant::now();
    let mut previous = (began, 0, footprint(pid).0);
    let mut check_step = |what: &str, max_writes: usize| {
        let writes = fixture.pod_writes().len();
        let (cpu, memory) = footprint(pid);
        let (step_began, before, spent) = previous;
        let (took, used) = (step_began.elapsed(), cpu - spent);
        println!(
            "{what}: {took:.1?}, {} writes to Pods, {used:.2} s, {memory} MB",
            writes - before
        );
        assert!(
            writes - before <= max_writes,
            "{what}: {} writes to {PODS} Pods",
            writes - before
        );
        previous = (Instant::now(), writes, cpu);
    };
    fixture.create_cloneset("web", json!({ "replicas": PODS })).await;
    fixture.wait_settled("web").await;
    check_step("made", 2 * PODS);
    let template_dry_runs = || {
        let dry_runs = fixture.dry_runs().into_iter();
        dry_runs
            .filter(|((_, resource, _), _)| resource == "podtemplates")
            .count()
    };
    let dry_runs_before = template_dry_runs();
    fixture.set_image("web", "example.com/app:2").await;
    fixture.wait_settled("web").await;
    check_step("updated in place", 3 * PODS);
    fixture.set_image("web", "example.com/app:3").await;
    fixture.wait_settled("web").await;
    check_step("updated in place again", 3 * PODS);
    // The API server may call a webhook twice if the object was written meanwhile.
    assert!(
        template_dry_runs() <= dry_runs_before + 3,
        "the webhook alone asks about another image"
    );
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 0 } }))
        .await;
    fixture.wait_pods("web", "gone", |pods| pods.is_empty()).await;
    check_step("deleted", PODS);
    let refused: Vec<_> = fixture
        .write_requests()
        .into_iter()
        .filter(|((_, resource, _), code)| resource.starts_with("pods") && *code >= 300)
        .collect();
    assert!(refused.len() < PODS / 10, "asked in vain: {refused:?}");
    let all_dry_runs = fixture.dry_runs();
    println!("{} dry runs", all_dry_runs.len());
    assert!(
        all_dry_runs.len() < PODS / 10,
        "tried without need: {all_dry_runs:?}"
    );
    // A status is written once a second at most while changes continue, and a few times more at the start of a step.
    let max_status_writes = began.elapsed().as_secs() as usize + 40;
    for (resource, max_writes) in [("clonesets/status", max_status_writes), ("events", MAX_EVENTS)] {
        let writes = fixture
            .accepted_writes()
            .iter()
            .filter(|w| w.1 == resource)
            .count();
        assert!(writes < max_writes, "{writes} writes of {resource}");
    }
}

/// The first Pods get an event each, then one event covers the rest.
#[tokio::test]
async fn one_by_one_rollout_creates_few_events() {
    let fixture = Fixture::new(shared_cluster(), "one-by-one").await;
    let rolling = json!({ "rollingUpdate": { "maxUnavailable": 1 } });
    let spec = json!({ "replicas": 40, "updateStrategy": rolling, "scaleStrategy": { "maxUnavailable": 5 } });
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    fixture.set_image("web", "example.com/app:2").await;
    fixture.wait_settled("web").await;
    let writes = fixture
        .accepted_writes()
        .into_iter()
        .filter(|w| w.1 == "events")
        .count();
    assert!(writes < MAX_EVENTS, "{writes} writes of events");
    let events = fixture
        .api("", "v1", "Event")
        .list(&Default::default())
        .await
        .unwrap();
    let of_update = events.items.iter().map(|event| json!(event));
    let of_update = of_update.filter(|event| event["reason"] == "SuccessfulUpdatePodInPlace");
    let update_events: Vec<Value> = of_update.collect();
    assert!((5..=11).contains(&update_events.len()), "{update_events:#?}");
}
