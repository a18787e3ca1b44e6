//! Requests and responses that are lost between the manager and the API server, and late watch events.

use std::collections::BTreeMap;

use kruise_api::cloneset::CloneSet;
use kube::api::{DynamicObject, Patch};
use kube::runtime::watcher;
use serde_json::{Value, json};
use testbed::cluster::ControlPlaneOptions;
use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::fixture::{Fixture, identities};
use crate::manager::Manager;
use crate::pods::{self, label};
use crate::proxy::{NetworkFault, Proxy};
use crate::test_cluster::TestCluster;
use crate::waits;

/// A manager behind a proxy, with the real garbage collector.
pub struct ProxiedCluster {
    pub cluster: &'static TestCluster,
    pub proxy: Proxy,
    pub manager: Manager,
}

static PROXIED_CLUSTER: OnceCell<RwLock<ProxiedCluster>> = OnceCell::const_new();

async fn cluster_lock() -> &'static RwLock<ProxiedCluster> {
    let start = || {
        let options = ControlPlaneOptions {
            controllers: true,
            enabled_controllers: "garbage-collector-controller,persistentvolumeclaim-protection-controller",
            ..ControlPlaneOptions::default()
        };
        let cluster: &'static TestCluster = Box::leak(Box::new(TestCluster::with_options(options)));
        let mut manager = Manager::on_free_ports(&cluster.plane, "kruise-manager");
        let proxy = Proxy::in_front_of(&manager.kubeconfig);
        manager.start().unwrap();
        manager.wait_for_readyz_text("leading");
        RwLock::new(ProxiedCluster {
            cluster,
            proxy,
            manager,
        })
    };
    PROXIED_CLUSTER
        .get_or_init(|| async { tokio::task::spawn_blocking(start).await.unwrap() })
        .await
}

/// For a test whose faults concern its own namespace only; such tests run in parallel.
pub async fn proxied_cluster() -> RwLockReadGuard<'static, ProxiedCluster> {
    cluster_lock().await.read().await
}

/// For a test that disturbs the whole cluster.
pub async fn exclusive_cluster() -> RwLockWriteGuard<'static, ProxiedCluster> {
    cluster_lock().await.write().await
}

/// The requests of a CloneSet's reconciles.
const REQUESTS: [&str; 10] = [
    "create pods",
    "delete pods",
    "patch pods",
    "patch pods/status",
    "create persistentvolumeclaims",
    "patch persistentvolumeclaims",
    "delete persistentvolumeclaims",
    "create controllerrevisions",
    "patch clonesets/status",
    "get pods",
];

/// The fault never ends.
const UNLIMITED: usize = usize::MAX;

/// Initial number of Pods.
const PODS: usize = 6;

/// Spec of `web`: six Pods with a claim each, updated in place, one at a time.
pub fn cloneset_spec(reuse: bool) -> Value {
    json!({
        "replicas": PODS,
        "scaleStrategy": { "enablePVCReuse": reuse },
        "updateStrategy": { "rollingUpdate": { "maxUnavailable": 1 } },
        "volumeClaimTemplates": [{
            "metadata": { "name": "data" },
            "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
        }],
    })
}

/// Waits until every Pod of `web` has its claim and there are no other claims; returns the claims' UIDs by Pod name.
pub async fn wait_for_claims(fixture: &Fixture) -> BTreeMap<String, String> {
    let set = fixture.sets().get("web").await.unwrap();
    let pods = fixture.pods_of("web").await;
    let names: Vec<String> = pods.iter().map(pods::name).collect();
    for pod in &pods {
        let id = label(pod, "apps.kruise.io/cloneset-instance-id");
        assert_eq!(pods::name(pod), format!("web-{id}"));
        let claim = &pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"];
        assert_eq!(*claim, json!(format!("data-web-{id}")));
    }
    let claims = fixture.api("", "v1", "PersistentVolumeClaim");
    let expected: Vec<String> = names.iter().map(|name| format!("data-{name}")).collect();
    let uid = json!(set.metadata.uid);
    let is_owned = |claim: &&Value| {
        let owners = claim["metadata"]["ownerReferences"].as_array().unwrap();
        owners.len() == 1 && owners[0]["uid"] == uid && !pods::is_terminating(claim)
    };
    let matches = |claims: &[&Value]| {
        claims
            .iter()
            .map(|claim| pods::name(claim))
            .eq(expected.iter().cloned())
            && claims.iter().all(is_owned)
    };
    let logs = || waits::log_tails([fixture.cluster.plane.dir().join("kruise-manager.log")]);
    let to_json = |one: DynamicObject| json!(one);
    let what = format!("the claims {expected:?} and no others");
    let claims = waits::watch_until(&what, &logs, claims, watcher::Config::default(), to_json, matches).await;
    for (claim, pod) in claims.iter().zip(&pods) {
        let id = label(pod, "apps.kruise.io/cloneset-instance-id");
        assert_eq!(label(claim, "apps.kruise.io/cloneset-instance-id"), id);
    }
    names.into_iter().zip(claims.iter().map(pods::uid)).collect()
}

/// How often the manager tried to create a Pod, successful or not.
fn pod_creations(fixture: &Fixture) -> usize {
    let all = fixture.cluster.plane.audited_writes().unwrap();
    let by_manager = all.iter().filter(|w| {
        w["verb"] == "create"
            && w["objectRef"]["resource"] == "pods"
            && w["objectRef"]["subresource"].is_null()
            && w["objectRef"]["namespace"] == fixture.namespace.as_str()
            && w["user"]["username"] == "system:serviceaccount:kruise-system:kruise-manager"
    });
    by_manager.count()
}

/// Creates Pods with a claim each.
async fn create_with_claims(fixture: &Fixture, reuse: bool) {
    let watch = fixture.watch_pods("web").await;
    fixture.create_cloneset("web", cloneset_spec(reuse)).await;
    fixture.wait_settled("web").await;
    assert!(watch.observed().max_pods <= PODS, "{:?}", watch.observed());
    wait_for_claims(fixture).await;
}

/// Updates Pods in place, one at a time.
async fn check_in_place_update(fixture: &Fixture) {
    let (pods, claims) = (fixture.pods_of("web").await, wait_for_claims(fixture).await);
    let watch = fixture.watch_pods("web").await;
    fixture.set_image("web", "example.com/app:2").await;
    fixture.wait_settled("web").await;
    assert_eq!(identities(&fixture.pods_of("web").await), identities(&pods));
    assert_eq!(wait_for_claims(fixture).await, claims);
    let observed = watch.observed();
    assert!(
        observed.max_pods == PODS && observed.min_serving >= PODS - 1,
        "{observed:?}"
    );
}

/// Requests the replacement of a Pod.
pub async fn mark_for_replacement(fixture: &Fixture, pod: &str) {
    let mark = json!({ "metadata": { "labels": { "apps.kruise.io/specified-delete": "true" } } });
    let mark = Patch::Merge(mark);
    fixture
        .pods()
        .patch(pod, &Default::default(), &mark)
        .await
        .unwrap();
}

/// Waits until a Pod is replaced by a new one with its own claim.
pub async fn wait_until_replaced(fixture: &Fixture, replaced: &str, before: &BTreeMap<String, String>) {
    let has_replacement = |pods: &[&Value]| {
        pods.len() == before.len()
            && pods
                .iter()
                .all(|pod| pods::name(pod) != replaced && pods::is_serving(pod))
    };
    fixture
        .wait_pods("web", "another in its place", has_replacement)
        .await;
    let after = wait_for_claims(fixture).await;
    let kept = after
        .iter()
        .filter(|(name, claim)| before.get(*name) == Some(claim));
    assert_eq!(kept.count(), before.len() - 1, "{before:?} {after:?}");
    assert!(
        after.values().all(|claim| *claim != before[replaced]),
        "{before:?} {after:?}"
    );
}

/// A user requests the replacement of a Pod.
async fn check_pod_replacement(fixture: &Fixture) {
    let before = wait_for_claims(fixture).await;
    let watch = fixture.watch_pods("web").await;
    let replaced = before.keys().next().unwrap();
    mark_for_replacement(fixture, replaced).await;
    wait_until_replaced(fixture, replaced, &before).await;
    let observed = watch.observed();
    assert!(
        observed.max_pods == PODS && observed.min_serving >= PODS - 1,
        "{observed:?}"
    );
}

/// Recreates the Pods; none is deleted before its replacement exists.
async fn check_recreate(fixture: &Fixture) {
    let before = wait_for_claims(fixture).await;
    let watch = fixture.watch_pods("web").await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 0, "maxSurge": 1 });
    let strategy = json!({ "updateStrategy": { "rollingUpdate": rolling } });
    fixture
        .set_image_and_spec("web", "example.com/app:3", strategy)
        .await;
    fixture.wait_settled("web").await;
    let after = wait_for_claims(fixture).await;
    assert!(after.keys().all(|name| !before.contains_key(name)));
    assert!(
        after
            .values()
            .all(|claim| before.values().all(|old| old != claim))
    );
    let observed = watch.observed();
    assert!(
        observed.max_pods <= PODS + 1 && observed.min_serving >= PODS,
        "{observed:?}"
    );
}

/// Scales down.
async fn check_scale_down(fixture: &Fixture, to: usize) {
    let before = wait_for_claims(fixture).await;
    let watch = fixture.watch_pods("web").await;
    fixture
        .patch_set("web", json!({ "spec": { "replicas": to } }))
        .await;
    fixture.wait_settled("web").await;
    let after = wait_for_claims(fixture).await;
    assert!(after.iter().all(|(name, claim)| before.get(name) == Some(claim)));
    let observed = watch.observed();
    assert!(
        observed.max_pods == PODS && observed.min_serving >= to,
        "{observed:?}"
    );
}

/// Runs a CloneSet's whole life while one of `every` requests of these kinds is lost, `times` times each. Returns how
/// many more creations than Pods there were, and how often it was unknown whether a Pod exists.
async fn run_lifecycle(
    (namespace, reuse): (&str, bool),
    (fault, every, times): (NetworkFault, usize, usize),
    requests: &[&'static str],
) -> (usize, usize) {
    let proxied = proxied_cluster().await;
    let fixture = Fixture::new(proxied.cluster, namespace).await;
    for what in requests {
        proxied.proxy.inject(namespace, what, fault, every, times);
    }
    create_with_claims(&fixture, reuse).await;
    check_in_place_update(&fixture).await;
    check_pod_replacement(&fixture).await;
    check_recreate(&fixture).await;
    check_scale_down(&fixture, 2).await;
    let faulted = proxied.proxy.faulted_requests(namespace);
    let count = |what: &str| faulted.iter().filter(|one| one.what == what).count();
    for what in &REQUESTS[..3] {
        assert!(count(what) > 0, "no {what} was lost: {faulted:?}");
    }
    (pod_creations(&fixture) - (PODS + 1 + PODS), count("get pods"))
}

#[tokio::test]
async fn lost_responses_change_nothing() {
    let (writes, all) = tokio::join!(
        run_lifecycle(
            ("answers-third", true),
            (NetworkFault::DropResponse, 3, UNLIMITED),
            &REQUESTS[..9]
        ),
        run_lifecycle(
            ("answers-second", false),
            (NetworkFault::DropResponse, 2, UNLIMITED),
            &REQUESTS
        )
    );
    assert_eq!(writes, (0, 0), "no Pod was requested twice");
    assert!(
        all.0 <= all.1,
        "{all:?}: requested again only if it could not be read"
    );
}

#[tokio::test]
async fn lost_requests_are_retried() {
    let (third, second) = tokio::join!(
        run_lifecycle(
            ("requests-third", false),
            (NetworkFault::DropRequest, 3, UNLIMITED),
            &REQUESTS
        ),
        run_lifecycle(
            ("requests-second", true),
            (NetworkFault::DropRequest, 2, UNLIMITED),
            &REQUESTS
        )
    );
    assert_eq!((third.0, second.0), (0, 0), "what arrived was not sent again");
}

#[tokio::test]
async fn request_timeouts_and_delayed_requests_do_no_harm() {
    // Each takes a full client timeout.
    let (silent, late) = tokio::join!(
        run_lifecycle(
            ("silence", true),
            (NetworkFault::NoResponse, 2, 1),
            &REQUESTS[..3]
        ),
        run_lifecycle(("late", false), (NetworkFault::Delay, 2, 1), &REQUESTS[..3])
    );
    assert_eq!(silent.0, 0);
    assert_eq!(late.0, 1, "the one that came late");
}

/// The API server is unreachable from the third Pod's creation on, until the manager loses its Lease.
#[tokio::test]
async fn api_server_outage_during_creation_leaves_nothing_behind() {
    let proxied = exclusive_cluster().await;
    let fixture = Fixture::new(proxied.cluster, "outage").await;
    proxied
        .proxy
        .inject("outage", "create pods", NetworkFault::Outage, 3, 1);
    let watch = fixture.watch_pods("web").await;
    fixture.create_cloneset("web", cloneset_spec(false)).await;
    proxied.manager.wait_for_readyz_text("standing by");
    proxied.proxy.end_outage();
    fixture.wait_settled("web").await;
    wait_for_claims(&fixture).await;
    assert!(watch.observed().max_pods <= PODS, "{:?}", watch.observed());
    assert!(
        pod_creations(&fixture) <= 2 * PODS,
        "each is requested at most twice"
    );
}

/// The manager does not wait forever for watch events of Pods that it wrote: it reads these Pods after a while.
#[tokio::test]
async fn missing_watch_events_do_not_block_reconcile() {
    let proxied = proxied_cluster().await;
    let fixture = Fixture::new(proxied.cluster, "unheard").await;
    proxied
        .proxy
        .inject("unheard", "watch pods", NetworkFault::DropRequest, 1, usize::MAX);
    fixture.create_cloneset("web", json!({ "replicas": 2 })).await;
    fixture.wait_settled("web").await;
    assert!(
        proxied.proxy.response_count("unheard", "get pods") > 0,
        "they were read"
    );
}

/// The watch still shows a ReplicaSet as owner of the Pods when a CloneSet that should adopt them is created.
#[tokio::test]
async fn orphans_not_yet_in_the_watch_are_adopted() {
    let proxied = proxied_cluster().await;
    let fixture = Fixture::new(proxied.cluster, "orphaned").await;
    let sets = fixture.api("apps", "v1", "ReplicaSet");
    let labels = json!({ "app": "web" });
    let containers = json!([{ "name": "app", "image": "example.com/app:1" }]);
    let template = json!({ "metadata": { "labels": labels }, "spec": { "containers": containers } });
    let spec = json!({ "selector": { "matchLabels": labels }, "replicas": 2, "template": template });
    let owner = fixture
        .create(&sets, json!({ "metadata": { "name": "web" }, "spec": spec }))
        .await;
    let owner = json!([{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web",
        "uid": owner.metadata.uid, "controller": true, "blockOwnerDeletion": true }]);
    for name in ["web-a", "web-b"] {
        let metadata = json!({ "name": name, "labels": labels, "ownerReferences": owner });
        let pod = json!({ "metadata": metadata, "spec": { "containers": containers } });
        fixture.create(&fixture.pods(), pod).await;
    }
    let before = identities(&fixture.pods_of("web").await);
    // By then the watch has delivered those, too.
    fixture.create_cloneset("late", json!({ "replicas": 1 })).await;
    fixture.wait_settled("late").await;
    proxied
        .proxy
        .inject("orphaned", "watch pods", NetworkFault::DropRequest, 1, usize::MAX);
    let orphan = [
        "delete",
        "replicaset",
        "web",
        "--cascade=orphan",
        "--namespace=orphaned",
    ];
    proxied.cluster.plane.kubectl(&orphan).unwrap();
    let paused = json!({ "replicas": 2, "updateStrategy": { "rollingUpdate": { "paused": true } } });
    fixture.create_cloneset("web", paused).await;
    let adopted = |set: &CloneSet| set.status.as_ref().is_some_and(|status| status.replicas == 2);
    fixture.wait_status("web", "has both", adopted).await;
    assert_eq!(identities(&fixture.pods_of("web").await), before);
}
