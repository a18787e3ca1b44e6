//! Defaults and validation of our webhook server, and how the API server's references to it are kept up to date.

use serde_json::{Value, json};

use crate::webhook_cluster::{
    WAIT_TIMEOUT, assert_denied, create, dynamic_api, merge, running_status, shared_cluster,
};

const BETA: &str = "apps.kruise.io/v1beta1";

fn request(pod: &str, containers: Value) -> Value {
    json!({
        "apiVersion": BETA, "kind": "ContainerRecreateRequest", "metadata": { "generateName": "admission-" },
        "spec": { "podName": pod, "containers": containers },
    })
}

#[tokio::test]
async fn request_defaults_come_from_the_pod() {
    let cluster = shared_cluster();
    cluster
        .create_pod("completed", Some("n1"), running_status())
        .await;
    let requests = dynamic_api(
        &cluster.admin().await,
        BETA,
        "ContainerRecreateRequest",
        Some("default"),
    );
    let created = create(
        &requests,
        request("completed", json!([{ "name": "app" }, { "name": "proxy" }])),
    )
    .await
    .unwrap();
    assert_eq!(
        created["metadata"]["labels"]["crr.apps.kruise.io/node-name"],
        "n1"
    );
    assert_eq!(created["metadata"]["labels"]["crr.apps.kruise.io/active"], "true");
    let app = &created["spec"]["containers"][0];
    assert_eq!(
        app["statusContext"],
        json!({ "containerID": "containerd://app-1", "restartCount": 2 })
    );
    assert_eq!(app["preStop"]["httpGet"]["path"], "/bye");
    assert_eq!(app["ports"][0]["containerPort"], 80);
    assert_eq!(
        created["spec"]["containers"][1]["statusContext"]["containerID"],
        "containerd://proxy-1"
    );
    assert_eq!(
        created["spec"]["strategy"],
        json!({ "failurePolicy": "Fail", "terminationGracePeriodSeconds": 7 })
    );

    let name = created["metadata"]["name"].as_str().unwrap();
    assert_denied(
        merge(&requests, name, json!({ "spec": { "podName": "other" } })).await,
        "spec of a ContainerRecreateRequest cannot be changed",
    );
    let label = json!({ "metadata": { "labels": { "crr.apps.kruise.io/node-name": "n2" } } });
    wait_until_denied(
        &requests,
        name,
        label,
        "metadata.labels[crr.apps.kruise.io/node-name] cannot be changed",
    )
    .await;
    let deactivate = json!({ "metadata": { "labels": { "crr.apps.kruise.io/active": null } } });
    merge(&requests, name, deactivate).await.unwrap();
}

#[tokio::test]
async fn requests_on_virtual_nodes_are_labelled() {
    let admin = shared_cluster().admin().await;
    let node = json!({ "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": "virtual", "labels": { "type": "virtual-kubelet" } } });
    create(&dynamic_api(&admin, "v1", "Node", None), node)
        .await
        .unwrap();
    shared_cluster()
        .create_pod("on-virtual", Some("virtual"), running_status())
        .await;
    let requests = dynamic_api(&admin, BETA, "ContainerRecreateRequest", Some("default"));
    let start = std::time::Instant::now();
    // The watch of virtual nodes may be a moment behind.
    loop {
        let created = create(&requests, request("on-virtual", json!([{ "name": "app" }])))
            .await
            .unwrap();
        if created["metadata"]["labels"]["type"] == "virtual-kubelet" {
            break;
        }
        assert!(
            start.elapsed() < WAIT_TIMEOUT,
            "the label does not come: {created}"
        );
    }
}

/// Waits until a new policy is enforced, which takes a moment.
async fn wait_until_denied(
    api: &kube::Api<kube::core::DynamicObject>,
    name: &str,
    patch: Value,
    message: &str,
) {
    let start = std::time::Instant::now();
    loop {
        // Revert what an attempt changed before the policy was enforced.
        match merge(api, name, patch.clone()).await {
            Ok(_) if start.elapsed() < WAIT_TIMEOUT => {
                let label = json!({ "metadata": { "labels": { "crr.apps.kruise.io/node-name": "n1" } } });
                let _ = merge(api, name, label).await;
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
            result => return assert_denied(result, message),
        }
    }
}

/// Invalid requests, and text of the rejection.
fn invalid_requests() -> Vec<(Value, &'static str)> {
    let app = || json!([{ "name": "app" }]);
    vec![
        (
            request("nobody", app()),
            "spec.podName: Invalid value: \"nobody\": there is no such Pod in namespace \"default\"",
        ),
        (
            request("homeless", app()),
            "spec.podName: Invalid value: \"homeless\": the Pod is not on a node yet",
        ),
        (
            request("over", app()),
            "the Pod has ended, its phase is Succeeded",
        ),
        (
            request("starting", app()),
            "spec.containers[0].name: Invalid value: \"app\": this container has not been started yet",
        ),
        (
            request("mistakes", json!([{ "name": "ap" }])),
            "spec.containers[0].name: Invalid value: \"ap\": the Pod has no such container; \
             containers that can be recreated: app, proxy",
        ),
        (
            request("mistakes", json!([{ "name": "setup" }])),
            "this is an init container that runs only once",
        ),
        (
            request("mistakes", json!([{ "name": "app" }, { "name": "app" }])),
            "this container is in the list twice",
        ),
        (request("mistakes", json!([])), "spec.containers: Required value"),
        (
            request(
                "mistakes",
                json!([{ "name": "app", "ports": [{ "containerPort": 1 }] }]),
            ),
            "spec.containers[0].ports",
        ),
    ]
}

#[tokio::test]
async fn invalid_requests_are_rejected_with_a_message() {
    let cluster = shared_cluster();
    let requests = dynamic_api(
        &cluster.admin().await,
        BETA,
        "ContainerRecreateRequest",
        Some("default"),
    );
    cluster.create_pod("mistakes", Some("n1"), running_status()).await;
    cluster
        .create_pod("homeless", None, json!({ "phase": "Pending" }))
        .await;
    cluster
        .create_pod("over", Some("n1"), json!({ "phase": "Succeeded" }))
        .await;
    cluster
        .create_pod("starting", Some("n1"), json!({ "phase": "Pending" }))
        .await;
    let app = || json!([{ "name": "app" }]);
    for (object, message) in invalid_requests() {
        assert_denied(create(&requests, object).await, message);
    }
    let mut short_deadline = request("mistakes", app());
    short_deadline["spec"]["activeDeadlineSeconds"] = json!(2);
    assert_denied(
        create(&requests, short_deadline).await,
        "spec.activeDeadlineSeconds: Invalid value: 2: spec.activeDeadlineSeconds in body should be greater than or equal to 3",
    );
    let mut negative_seconds = request("mistakes", app());
    negative_seconds["spec"]["strategy"] = json!({ "minStartedSeconds": -1 });
    assert_denied(
        create(&requests, negative_seconds).await,
        "spec.strategy.minStartedSeconds: Invalid value: -1",
    );
}

#[tokio::test]
async fn job_defaults_and_validation() {
    let admin = shared_cluster().admin().await;
    for version in ["v1beta1", "v1alpha1"] {
        let version = format!("apps.kruise.io/{version}");
        let jobs = dynamic_api(&admin, &version, "ImagePullJob", Some("default"));
        let job = |spec: Value| {
            json!({ "apiVersion": version, "kind": "ImagePullJob",
            "metadata": { "generateName": "admission-" }, "spec": spec })
        };
        let created = create(&jobs, job(json!({ "image": "nginx", "completionPolicy": {} })))
            .await
            .unwrap();
        assert_eq!(created["spec"]["completionPolicy"]["type"], "Always");
        assert_eq!(created["spec"]["imagePullPolicy"], "IfNotPresent");
        assert_eq!(
            created["spec"]["pullPolicy"],
            json!({ "timeoutSeconds": 600, "backoffLimit": 3 })
        );
        assert_denied(
            create(
                &jobs,
                job(json!({ "image": "Not Valid", "completionPolicy": {} })),
            )
            .await,
            "spec.image: Invalid value: \"Not Valid\": image reference \"Not Valid\" is not valid",
        );
        let invalid_selector =
            json!({ "image": "a", "completionPolicy": {}, "selector": { "matchLabels": { "a b": "" } } });
        assert_denied(
            create(&jobs, job(invalid_selector)).await,
            "spec.selector.matchLabels[a b]: Invalid value: \"a b\"",
        );
    }
}

/// Nodes may be added later, so an unknown node name is accepted, with a warning.
#[test]
fn unknown_node_name_causes_a_warning() {
    let mut kubectl = shared_cluster().plane.kubectl_command();
    kubectl.args(["create", "--dry-run=server", "-f", "-"]);
    let job = json!({ "apiVersion": BETA, "kind": "ImagePullJob", "metadata": { "name": "warned", "namespace": "default" },
        "spec": { "image": "nginx", "completionPolicy": {}, "selector": { "names": ["ghost"] } } });
    let pipe = std::process::Stdio::piped;
    let mut child = kubectl
        .stdin(pipe())
        .stdout(pipe())
        .stderr(pipe())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), job.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let output = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.contains("spec.selector.names: there is no node \"ghost\" now"),
        "{output}"
    );
}

#[tokio::test]
async fn node_image_defaults_and_validation() {
    let images = dynamic_api(&shared_cluster().admin().await, BETA, "NodeImage", None);
    let image = |name: &str, tags: Value| {
        json!({ "apiVersion": BETA, "kind": "NodeImage", "metadata": { "name": name },
            "spec": { "images": { "nginx": { "tags": tags } } } })
    };
    let ttl = json!({ "ttlSecondsAfterFinished": 1 });
    let tags = json!([{ "tag": "2", "pullPolicy": ttl }, { "tag": "1", "pullPolicy": ttl }]);
    let created = create(&images, image("completed", tags)).await.unwrap();
    let tags = &created["spec"]["images"]["nginx"]["tags"];
    assert_eq!((&tags[0]["tag"], &tags[1]["tag"]), (&json!("1"), &json!("2")));
    assert_eq!(tags[0]["pullPolicy"]["timeoutSeconds"], 600);
    assert!(tags[0]["createdAt"].is_string());
    let twice = json!([{ "tag": "1", "pullPolicy": ttl }, { "tag": "1", "pullPolicy": ttl }]);
    assert_denied(
        create(&images, image("twice", twice)).await,
        "spec.images[nginx].tags[1].tag: Invalid value: \"1\": this tag is in the list twice",
    );
    assert_denied(
        create(&images, image("forever", json!([{ "tag": "1" }]))).await,
        "spec.images[nginx].tags[0].pullPolicy.ttlSecondsAfterFinished: Required value",
    );
}
