//! CloneSets whose Pods a kubelet runs: moved to our manager and back, applied again in every way, without a restart.

use kruise_cluster::Cluster;
use testbed::cluster::Image;

use crate::interop_cluster::InteropCluster;
use crate::takeover::services_instead_of_urls;
use support::charts::{ApplyMethod, Chart, Charts, StableIdentities};
use support::connect::connect;
use support::conversion::{CONVERTED_KINDS, wait_for_conversion};
use support::programs::STORAGE_CLASS;

/// Templates with what most charts have, with images that the bed has.
const TEMPLATES: &str = r#"
name: account
template:
  metadata: { labels: { app: account } }
  spec:
    serviceAccountName: account
    securityContext: { runAsUser: 1000, fsGroup: 2000, seccompProfile: { type: RuntimeDefault } }
    containers:
      - name: app
        image: kruise-test/term:1
        imagePullPolicy: IfNotPresent
        env:
          - { name: NODE, valueFrom: { fieldRef: { fieldPath: spec.nodeName } } }
          - { name: LIMIT, valueFrom: { resourceFieldRef: { resource: limits.cpu } } }
        envFrom: [{ configMapRef: { name: none, optional: true } }]
        resources: { requests: { cpu: 10m }, limits: { cpu: 500m, memory: 64Mi } }
        volumeMounts: [{ name: token, mountPath: /token }]
    volumes:
      - name: token
        projected:
          sources:
            - { serviceAccountToken: { path: token } }
            - { downwardAPI: { items: [{ path: labels, fieldRef: { fieldPath: metadata.labels } }] } }
            - { configMap: { name: none, optional: true } }
---
name: probes
template:
  metadata: { labels: { app: probes } }
  spec:
    containers:
      - name: app
        image: kruise-test/term:1
        imagePullPolicy: IfNotPresent
        startupProbe: { exec: { command: ["true"] }, periodSeconds: 1 }
        livenessProbe: { exec: { command: ["true"] } }
        lifecycle: { postStart: { exec: { command: ["true"] } }, preStop: { exec: { command: ["true"] } } }
      - name: server
        image: registry.k8s.io/e2e-test-images/agnhost:2.53
        imagePullPolicy: IfNotPresent
        args: [grpc-health-checking]
        readinessProbe: { grpc: { port: 5000 }, periodSeconds: 1 }
---
name: sidecar
template:
  metadata: { labels: { app: sidecar } }
  spec:
    terminationGracePeriodSeconds: 5
    initContainers:
      - { name: setup, image: "kruise-test/term:1", imagePullPolicy: IfNotPresent, command: ["true"] }
      - { name: proxy, image: "kruise-test/term:1", imagePullPolicy: IfNotPresent, restartPolicy: Always }
    containers: [{ name: app, image: "kruise-test/term:1", imagePullPolicy: IfNotPresent, ports: [{ containerPort: 80 }] }]
    topologySpreadConstraints:
      - { maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway, labelSelector: { matchLabels: { app: sidecar } } }
    volumes: [{ name: cache, emptyDir: { medium: Memory, sizeLimit: 1Mi } }]
---
name: claims
template:
  metadata: { labels: { app: claims } }
  spec:
    containers:
      - name: app
        image: kruise-test/term:1
        imagePullPolicy: IfNotPresent
        volumeMounts: [{ name: data, mountPath: /volume }, { name: scratch, mountPath: /scratch }]
    volumes:
      - name: scratch
        ephemeral: { volumeClaimTemplate: { spec: { accessModes: [ReadWriteOnce], resources: { requests: { storage: 1Mi } } } } }
volumeClaimTemplates:
  - { metadata: { name: data }, spec: { accessModes: [ReadWriteOnce], resources: { requests: { storage: 1Mi } } } }
"#;

/// The state once all Pods are available.
async fn wait_and_snapshot(charts: &Charts, cluster: &InteropCluster, what: &str) -> StableIdentities {
    charts.wait_observed(what).await;
    charts.wait_available(&cluster.node.plane, what).await;
    charts.stable_identities().await
}

/// Applies everything again, and then a new image: only each first container is restarted for that.
async fn check_reapply(charts: &Charts, cluster: &InteropCluster, images: [Option<&str>; 2], what: &str) {
    let before = wait_and_snapshot(charts, cluster, what).await;
    assert!(before.restarts.len() > 4, "{before:?}");
    charts
        .assert_reapply_is_noop(&cluster.node.plane, images[0], what)
        .await;
    charts
        .assert_in_place_image_update(&cluster.node.plane, images[1].unwrap(), what)
        .await;
    let mut after = wait_and_snapshot(charts, cluster, what).await.restarts;
    let changed = after.iter_mut().filter(|((_, container), _)| container == "app");
    changed.for_each(|(_, count)| *count -= 1);
    assert_eq!(after, before.restarts, "{}: {what}", charts.namespace);
}

async fn create_charts(cluster: &InteropCluster, admin: &Cluster) -> [Charts; 2] {
    let plane = &cluster.node.plane;
    let all = [("beta", "v1beta1"), ("alpha", "v1alpha1")];
    let all = all.map(|version| Charts::with_charts(plane, admin, version, Chart::parse_all(TEMPLATES)));
    for charts in &all {
        charts.apply_all(plane, ApplyMethod::ClientSide, None).await;
    }
    all
}

#[tokio::test]
async fn takeover_and_return_restart_no_container() {
    let cluster = InteropCluster::start().await;
    let plane = &cluster.node.plane;
    let admin = &connect(plane.kubeconfig()).await;
    plane.apply(STORAGE_CLASS).unwrap();
    let term = Image::busybox().script("trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done");
    cluster.node.runtime.registry.push("cross/next:3", &term).unwrap();
    cluster.peer().install().unwrap();
    let go_manager = cluster.peer().start_manager().unwrap();
    let all = create_charts(&cluster, admin).await;
    let mut before = Vec::new();
    for charts in &all {
        before.push(wait_and_snapshot(charts, &cluster, "made").await);
    }
    cluster.kill(go_manager);

    cluster.deploy("apply", "default");
    let mut rust_manager = cluster.start_manager();
    rust_manager.wait_for_readyz_text("leading");
    wait_for_conversion(plane, &CONVERTED_KINDS);
    let (second, third) = ("kruise-test/term:2", "cross/next:3");
    for (charts, before) in all.iter().zip(before) {
        assert_eq!(
            wait_and_snapshot(charts, &cluster, "taken over").await,
            before,
            "{}",
            charts.namespace
        );
        check_reapply(charts, &cluster, [None, Some(second)], "ours").await;
    }
    let mut before = Vec::new();
    for charts in &all {
        before.push(wait_and_snapshot(charts, &cluster, "ours").await);
    }
    rust_manager.stop().unwrap();

    for folder in ["manager", "policies", "webhooks"] {
        cluster.deploy("delete", folder);
    }
    cluster.deploy("apply", "crds");
    services_instead_of_urls(plane);
    cluster.peer().install().unwrap();
    cluster.peer().start_manager().unwrap();
    for (charts, before) in all.iter().zip(before) {
        assert_eq!(
            wait_and_snapshot(charts, &cluster, "back").await,
            before,
            "{}",
            charts.namespace
        );
        check_reapply(charts, &cluster, [Some(second), Some(third)], "theirs again").await;
    }
}
