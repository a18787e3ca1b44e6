//! `kruise-manager` itself, with the service account of an installation: its roles suffice for everything it does, the
//! fence allows the daemon's part, and no request is denied.

use std::time::Duration;

use kruise_cluster::Cluster;
use kube::api::{Api, DynamicObject};
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, TokenBinding};

use crate::manager::Manager;
use crate::webhook_cluster::{
    WAIT_TIMEOUT, assert_denied, connect, create, dynamic_api, install, merge, merge_status, running_status,
    wait_for_webhooks,
};
use support::readiness::http_get;
use support::waits;

/// Arguments of OpenKruise's Helm chart, with the bed's addresses.
fn chart_arguments(arguments: &str) -> Vec<String> {
    let is_relevant = |argument: &&str| !argument.contains("addr=") && !argument.contains("socket-file=");
    arguments.lines().filter(is_relevant).map(str::to_owned).collect()
}

const BETA: &str = "apps.kruise.io/v1beta1";

/// Its log.
fn log_of(manager: &Manager) -> String {
    std::fs::read_to_string(manager.log()).unwrap()
}

/// Returns the object once `predicate` holds.
async fn wait_until(
    api: &Api<DynamicObject>,
    name: &str,
    what: &str,
    predicate: impl Fn(&Value) -> bool,
) -> Value {
    let start = std::time::Instant::now();
    let mut last = Value::Null;
    while start.elapsed() < WAIT_TIMEOUT {
        if let Some(object) = api.get_opt(name).await.unwrap() {
            last = serde_json::to_value(object).unwrap();
            if predicate(&last) {
                return last;
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{what} did not come; {name} is {last}");
}

async fn wait_until_deleted(api: &Api<DynamicObject>, name: &str) {
    let start = std::time::Instant::now();
    while api.get_opt(name).await.unwrap().is_some() {
        assert!(start.elapsed() < WAIT_TIMEOUT, "{name} does not go");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn create_ready_node(admin: &Cluster) {
    let nodes = dynamic_api(admin, "v1", "Node", None);
    create(
        &nodes,
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } }),
    )
    .await
    .unwrap();
    let status = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True", "reason": "R", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z", "lastHeartbeatTime": "2026-01-01T00:00:00Z" }] } });
    merge_status(&nodes, "n1", status).await.unwrap();
}

/// Starts an API server with our manager as leader, one node, and an administrator's client.
async fn start_cluster() -> (ControlPlane, Manager, Cluster) {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "default");
    plane
        .kubectl(&["create", "serviceaccount", "default", "--namespace=default"])
        .unwrap();
    let mut arguments = chart_arguments(include_str!("../data/flags/chart-manager.txt"));
    arguments.push("--nodeimage-creation-delay=0s".into());
    let mut manager = Manager::on_free_ports_with(&plane, "kruise-manager", &arguments);
    manager.start().unwrap();
    wait_for_webhooks(&plane);
    let admin = connect(plane.kubeconfig()).await;
    create_ready_node(&admin).await;
    (plane, manager, admin)
}

/// Client with the account of the node's daemon.
async fn daemon_client(plane: &ControlPlane) -> Cluster {
    connect(
        &plane
            .kubeconfig_for("kruise-system", "kruise-daemon", TokenBinding::Node("n1"))
            .unwrap(),
    )
    .await
}

/// Waits until each of these texts begins a line of level INFO.
async fn wait_for_logs(manager: &Manager, messages: &[&str]) {
    for text in messages {
        waits::wait_for_log(manager.log(), text, "").await;
    }
}

fn assert_nothing_forbidden(manager: &Manager) {
    let log = log_of(manager);
    assert!(!log.contains("orbidden"), "something was refused: {log}");
}

/// Creates a job with a pull secret, and returns the NodeImage once it has the image.
async fn create_job_with_secret(admin: &Cluster) -> Value {
    let images = dynamic_api(admin, BETA, "NodeImage", None);
    wait_until(&images, "n1", "the NodeImage", |_| true).await;
    let secret = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "registry" },
        "type": "kubernetes.io/dockerconfigjson", "stringData": { ".dockerconfigjson": "{\"auths\":{}}" } });
    create(&dynamic_api(admin, "v1", "Secret", Some("default")), secret)
        .await
        .unwrap();
    let job = json!({ "apiVersion": BETA, "kind": "ImagePullJob", "metadata": { "name": "job" },
        "spec": { "image": "nginx:1", "pullSecrets": ["registry"], "completionPolicy": {} } });
    create(&dynamic_api(admin, BETA, "ImagePullJob", Some("default")), job)
        .await
        .unwrap();
    let has_tag = |image: &Value| image["spec"]["images"]["nginx"]["tags"][0].is_object();
    wait_until(&images, "n1", "the tag", has_tag).await["spec"]["images"]["nginx"].clone()
}

#[tokio::test]
async fn job_with_pull_secret_runs_with_real_accounts() {
    let (plane, manager, admin) = start_cluster().await;
    let image = create_job_with_secret(&admin).await;
    let reference = &image["pullSecrets"][0];
    assert_eq!(
        reference["namespace"],
        "kruise-daemon-config",
        "{}",
        log_of(&manager)
    );

    let daemon = daemon_client(&plane).await;
    let copies = dynamic_api(&daemon, "v1", "Secret", Some("kruise-daemon-config"));
    let copy = reference["name"].as_str().unwrap();
    wait_until(&copies, copy, "the copy", |secret| secret["data"].is_object()).await;
    let done = json!({ "status": { "desired": 1, "succeeded": 1, "imageStatuses": { "nginx": { "tags": [{
        "tag": "1", "phase": "Succeeded", "progress": 100, "version": image["tags"][0]["version"],
        "startTime": "2026-01-01T00:00:00Z", "completionTime": "2026-01-01T00:00:01Z" }] } } } });
    merge_status(&dynamic_api(&daemon, BETA, "NodeImage", None), "n1", done)
        .await
        .unwrap();
    let jobs = dynamic_api(&admin, BETA, "ImagePullJob", Some("default"));
    let ended = |job: &Value| job["status"]["completionTime"].is_string();
    assert_eq!(
        wait_until(&jobs, "job", "the job's end", ended).await["status"]["succeeded"],
        1
    );

    jobs.delete("job", &kube::api::DeleteParams::default())
        .await
        .unwrap();
    wait_until_deleted(&jobs, "job").await;
    wait_until_deleted(
        &dynamic_api(&admin, "v1", "Secret", Some("kruise-daemon-config")),
        copy,
    )
    .await;
    assert_nothing_forbidden(&manager);
    assert!(log_of(&manager).contains("flag has no effect flag=\"--sync-period\""));
    wait_for_logs(
        &manager,
        &[
            "became leader",
            "made certificates for webhooks",
            "NodeImage created",
            "pull secret copied",
            "ImagePullJob started",
            "ImagePullJob ended",
            "copy of a pull secret deleted",
        ],
    )
    .await;
}

/// Returns the object once its condition has that status.
async fn wait_for_condition(api: &Api<DynamicObject>, name: &str, type_: &str, status: &str) {
    let what = format!("{type_} {status}");
    wait_until(api, name, &what, |object| {
        let all = object["status"]["conditions"].as_array();
        all.into_iter()
            .flatten()
            .any(|one| one["type"] == type_ && one["status"] == status)
    })
    .await;
}

#[tokio::test]
async fn recreate_request_runs_with_real_accounts() {
    let (plane, manager, admin) = start_cluster().await;
    let pods = dynamic_api(&admin, "v1", "Pod", Some("default"));
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" }, "spec": { "nodeName": "n1",
        "readinessGates": [{ "conditionType": "KruisePodReady" }], "containers": [{ "name": "app", "image": "i" }] } });
    create(&pods, pod).await.unwrap();
    let mut status = running_status();
    status.as_object_mut().unwrap().remove("initContainerStatuses");
    merge_status(&pods, "p", json!({ "status": status }))
        .await
        .unwrap();
    wait_for_condition(&pods, "p", "KruisePodReady", "True").await;

    let requests = dynamic_api(&admin, BETA, "ContainerRecreateRequest", Some("default"));
    let request = json!({ "apiVersion": BETA, "kind": "ContainerRecreateRequest", "metadata": { "name": "r" },
        "spec": { "podName": "p", "containers": [{ "name": "app" }], "ttlSecondsAfterFinished": 1,
            "strategy": { "unreadyGracePeriodSeconds": 1 } } });
    create(&requests, request).await.unwrap();
    let own = dynamic_api(
        &daemon_client(&plane).await,
        BETA,
        "ContainerRecreateRequest",
        Some("default"),
    );
    merge_status(&own, "r", json!({ "status": { "phase": "Recreating" } }))
        .await
        .unwrap();
    wait_for_condition(&requests, "r", "PreRecreateGrace", "True").await;
    wait_for_condition(&pods, "p", "KruisePodReady", "False").await;
    let done = json!({ "status": { "phase": "Completed", "completionTime": "2026-01-01T00:00:00Z" } });
    merge_status(&own, "r", done).await.unwrap();
    wait_for_condition(&pods, "p", "KruisePodReady", "True").await;
    wait_until_deleted(&requests, "r").await;
    assert_nothing_forbidden(&manager);
    wait_for_logs(
        &manager,
        &[
            "marked the Pod not ready for the request",
            "marked the Pod ready again for the request",
            "deleted the request: ttlSecondsAfterFinished is over",
        ],
    )
    .await;
}

/// Label value `Cascading` blocks the deletion of a Namespace while it has active Pods or bound claims.
async fn check_cascading_namespace_protection(plane: &ControlPlane) {
    let admin = connect(plane.kubeconfig()).await;
    let namespaces = dynamic_api(&admin, "v1", "Namespace", None);
    let label = json!({ "policy.kruise.io/delete-protection": "Cascading" });
    let object =
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "used", "labels": label } });
    create(&namespaces, object).await.unwrap();
    plane
        .kubectl(&["create", "serviceaccount", "default", "--namespace=used"])
        .unwrap();
    let dry_run_delete = async || {
        let params = kube::api::DeleteParams::default().dry_run();
        let done = namespaces.delete("used", &params).await;
        done.map(|_| json!(null)).map_err(|why| why.to_string())
    };
    dry_run_delete().await.unwrap();
    let (pods, claims) = (
        dynamic_api(&admin, "v1", "Pod", Some("used")),
        dynamic_api(&admin, "v1", "PersistentVolumeClaim", Some("used")),
    );
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" },
        "spec": { "containers": [{ "name": "app", "image": "i" }] } });
    create(&pods, pod).await.unwrap();
    let claim = json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "c" },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } });
    create(&claims, claim).await.unwrap();
    let text =
        "forbidden by ResourcesProtectionDeletion for policy.kruise.io/delete-protection=Cascading and";
    assert_denied(
        dry_run_delete().await,
        &format!("{text} active pods 1>0; remove the label from Namespace used"),
    );
    merge_status(&pods, "p", json!({ "status": { "phase": "Succeeded" } }))
        .await
        .unwrap();
    dry_run_delete().await.unwrap();
    merge_status(&claims, "c", json!({ "status": { "phase": "Bound" } }))
        .await
        .unwrap();
    assert_denied(
        dry_run_delete().await,
        &format!("{text} \"Bound\" status pvc 1>0; remove the label"),
    );
    let remove_label = json!({ "metadata": { "labels": { "policy.kruise.io/delete-protection": null } } });
    merge(&namespaces, "used", remove_label).await.unwrap();
    dry_run_delete().await.unwrap();
}

/// As `deploy/` runs them: each role with its own account, and neither is denied anything.
#[tokio::test]
async fn separate_webhooks_and_controllers_with_real_accounts() {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "default");
    plane
        .kubectl(&["create", "serviceaccount", "default", "--namespace=default"])
        .unwrap();
    let port = testbed::port::reserve().unwrap();
    let mut webhooks = Manager::with_role(&plane, "kruise-webhook", "webhooks", port);
    webhooks.spawn().unwrap();
    webhooks.wait_for_readyz_text("has no certificates yet; kruise-manager makes them");
    let mut controllers = Manager::with_role(&plane, "kruise-manager", "controllers", port);
    controllers.start().unwrap();
    webhooks.wait_ready().unwrap();
    wait_for_webhooks(&plane);
    controllers.wait_for_readyz_text("ok admission: there are certificates");
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/examples/cloneset.yaml");
    plane.kubectl(&["apply", "-f", example]).unwrap();
    let sets = dynamic_api(
        &connect(plane.kubeconfig()).await,
        BETA,
        "CloneSet",
        Some("default"),
    );
    wait_until(&sets, "web", "three Pods", |set| set["status"]["replicas"] == 3).await;
    for process in [&controllers, &webhooks] {
        assert_nothing_forbidden(process);
    }
    check_cascading_namespace_protection(&plane).await;
    // One role creates another authority, and the other serves it.
    let certificates = [
        "delete",
        "--namespace=kruise-system",
        "secret",
        "kruise-manager-webhook-certs",
    ];
    plane.kubectl(&certificates).unwrap();
    let again = [
        "get",
        "--namespace=kruise-system",
        "secret",
        "kruise-manager-webhook-certs",
    ];
    testbed::cluster::wait::until("certificates are made again", WAIT_TIMEOUT, || {
        Ok(plane.kubectl(&again).ok())
    })
    .unwrap();
    wait_for_webhooks(&plane);
}

/// A daemon checks whether it is fenced, and reports it if it is not.
#[tokio::test]
async fn daemon_reports_whether_it_is_fenced() {
    let plane = ControlPlane::start().unwrap();
    for folder in ["crds", "policies"] {
        install(&plane, folder);
    }
    let namespaces = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/default/namespaces.yaml");
    plane.kubectl(&["apply", "-f", namespaces]).unwrap();
    install(&plane, "rbac");
    plane
        .kubectl(&["create", "serviceaccount", "default", "--namespace=default"])
        .unwrap();
    let admin = connect(plane.kubeconfig()).await;
    create_ready_node(&admin).await;
    for node in ["n1", "n2"] {
        let image = json!({ "apiVersion": BETA, "kind": "NodeImage", "metadata": { "name": node } });
        create(&dynamic_api(&admin, BETA, "NodeImage", None), image)
            .await
            .unwrap();
        let alpha = "apps.kruise.io/v1alpha1";
        let probes = json!({ "apiVersion": alpha, "kind": "NodePodProbe", "metadata": { "name": node } });
        create(&dynamic_api(&admin, alpha, "NodePodProbe", None), probes)
            .await
            .unwrap();
    }
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" },
        "spec": { "nodeName": "n1", "containers": [{ "name": "app", "image": "i" }] } });
    create(&dynamic_api(&admin, "v1", "Pod", Some("default")), pod)
        .await
        .unwrap();
    let request = json!({ "apiVersion": BETA, "kind": "ContainerRecreateRequest",
        "metadata": { "name": "r", "labels": { "crr.apps.kruise.io/node-name": "n2" } },
        "spec": { "podName": "q", "containers": [{ "name": "app" }] } });
    create(
        &dynamic_api(&admin, BETA, "ContainerRecreateRequest", Some("default")),
        request,
    )
    .await
    .unwrap();
    let account = plane
        .kubeconfig_for("kruise-system", "kruise-daemon", TokenBinding::Node("n1"))
        .unwrap();
    let health = format!("127.0.0.1:{}", testbed::port::reserve().unwrap());
    // As in a cluster, the account is not given by flag.
    let mut daemon = plane
        .component("kruise-daemon", support::binaries::daemon())
        .args(chart_arguments(include_str!("../data/flags/chart-daemon.txt")))
        .args([
            format!("--addr={health}"),
            format!("--control-socket={}", plane.dir().join("control.sock").display()),
            format!("--socket-file={}", plane.dir().join("none.sock").display()),
        ])
        .env("KUBECONFIG", account.display().to_string())
        .env("NODE_NAME", "n1");
    let wait_for_text = |path: &str, text: &str| {
        let outcome = testbed::cluster::wait::until(text, WAIT_TIMEOUT, || {
            Ok(http_get(&health, path).contains(text).then_some(()))
        });
        outcome.unwrap_or_else(|why| panic!("{why}: {}", http_get(&health, path)));
    };
    daemon.start().unwrap();
    wait_for_text(
        "/readyz",
        "ok fence: writes about other nodes are refused: events, nodeimages, nodepodprobes, containerrecreaterequests, pods",
    );
    wait_for_text("/metrics", "kruise_daemon_fenced{kind=\"pods\"} 1");
    daemon.stop().unwrap();
    let policies = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/policies");
    plane.kubectl(&["delete", "-k", policies]).unwrap();
    daemon.start().unwrap();
    let text = "NOT FENCED: writes about other nodes are not refused: \
        events, nodeimages, nodepodprobes, containerrecreaterequests, pods";
    wait_for_text("/readyz", text);
    let readiness = http_get(&health, "/readyz");
    assert!(
        readiness.starts_with("HTTP/1.1 503") && readiness.contains("NOT READY fence"),
        "{readiness}"
    );
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    for line in [
        "writes about other nodes are not refused; apply deploy/policies",
        "flag has no effect flag=\"--enable-pprof\"",
    ] {
        assert!(log.contains(line), "{line}: {log}");
    }
    wait_for_text("/metrics", "kruise_daemon_fenced{kind=\"nodeimages\"} 0");
    install(&plane, "policies");
    wait_for_text(
        "/readyz",
        "ok fence: writes about other nodes are refused: events, nodeimages, nodepodprobes, containerrecreaterequests, pods",
    );
    daemon.stop().unwrap();
}
