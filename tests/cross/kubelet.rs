//! CloneSets whose Pods a kubelet runs: over to ours and back, applied again in every way, without a restart.

use kruise_cluster::Cluster;
use testbed::cluster::Image;

use crate::bed::Bed;
use crate::take_over::services_instead_of_urls;
use support::charts::{Chart, Charts, How, Kept};
use support::connect::connect;
use support::converted::{ALL, until_converted};
use support::programs::STORAGE;

/// Templates with what most charts have, of images that the bed has.
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

/// What there is once all Pods are available.
async fn kept(charts: &Charts, bed: &Bed, what: &str) -> Kept {
    charts.settled(what).await;
    charts.available(&bed.node.plane, what).await;
    charts.kept().await
}

/// Applies everything again, and then another image: each first container is restarted for that, and nothing else is.
async fn applied_again(charts: &Charts, bed: &Bed, images: [Option<&str>; 2], what: &str) {
    let before = kept(charts, bed, what).await;
    assert!(before.restarts.len() > 4, "{before:?}");
    charts.nothing_changes(&bed.node.plane, images[0], what).await;
    charts
        .image_changes_in_place(&bed.node.plane, images[1].unwrap(), what)
        .await;
    let mut after = kept(charts, bed, what).await.restarts;
    let changed = after.iter_mut().filter(|((_, container), _)| container == "app");
    changed.for_each(|(_, count)| *count -= 1);
    assert_eq!(after, before.restarts, "{}: {what}", charts.namespace);
}

async fn made(bed: &Bed, admin: &Cluster) -> [Charts; 2] {
    let plane = &bed.node.plane;
    let all = [("beta", "v1beta1"), ("alpha", "v1alpha1")];
    let all = all.map(|of| Charts::of(plane, admin, of, Chart::all_of(TEMPLATES)));
    for charts in &all {
        charts.write(plane, How::ClientSide, None).await;
    }
    all
}

#[tokio::test]
async fn no_container_is_restarted_on_the_way_over_and_back() {
    let bed = Bed::start().await;
    let plane = &bed.node.plane;
    let admin = &connect(plane.kubeconfig()).await;
    plane.apply(STORAGE).unwrap();
    let term = Image::busybox().script("trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done");
    bed.node.runtime.registry.push("cross/next:3", &term).unwrap();
    bed.peer().install().unwrap();
    let theirs = bed.peer().manager().unwrap();
    let all = made(&bed, admin).await;
    let mut left = Vec::new();
    for charts in &all {
        left.push(kept(charts, &bed, "made").await);
    }
    bed.end(theirs);

    bed.deploy("apply", "default");
    let mut ours = bed.manager();
    ours.until_it_says("leading");
    until_converted(plane, &ALL);
    let (second, third) = ("kruise-test/term:2", "cross/next:3");
    for (charts, left) in all.iter().zip(left) {
        assert_eq!(
            kept(charts, &bed, "taken over").await,
            left,
            "{}",
            charts.namespace
        );
        applied_again(charts, &bed, [None, Some(second)], "ours").await;
    }
    let mut left = Vec::new();
    for charts in &all {
        left.push(kept(charts, &bed, "ours").await);
    }
    ours.stop().unwrap();

    for folder in ["manager", "policies", "webhooks"] {
        bed.deploy("delete", folder);
    }
    bed.deploy("apply", "crds");
    services_instead_of_urls(plane);
    bed.peer().install().unwrap();
    bed.peer().manager().unwrap();
    for (charts, left) in all.iter().zip(left) {
        assert_eq!(kept(charts, &bed, "back").await, left, "{}", charts.namespace);
        applied_again(charts, &bed, [Some(second), Some(third)], "theirs again").await;
    }
}
