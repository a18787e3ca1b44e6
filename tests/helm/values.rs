//! What the values of the chart do, and what their schema refuses.

use std::collections::BTreeSet;
use std::fs;

use kruise_ops::{FeatureGate, FeatureGates};
use serde_json::{Value, json};

use crate::{chart, helm_command, image_values, repository, run, template};

const MANAGER: &str = "Deployment/kruise-system/kruise-manager";
const WEBHOOK: &str = "Deployment/kruise-system/kruise-webhook";
const DAEMON: &str = "DaemonSet/kruise-system/kruise-daemon";
const POD: &str = "/spec/template/spec";

/// Value as JSON, the object that it changes, where, and what is there then.
type Effect = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
);

/// One row at least for each value that has an effect.
const EFFECTS: &[Effect] = &[
    (
        "featureGates",
        r#""TemplateNoDefaults=true""#,
        MANAGER,
        "POD/containers/0/args/3",
        r#""--feature-gates=TemplateNoDefaults=true""#,
    ),
    (
        "featureGates",
        r#""TemplateNoDefaults=true""#,
        WEBHOOK,
        "POD/containers/0/args/3",
        r#""--feature-gates=TemplateNoDefaults=true""#,
    ),
    (
        "featureGates",
        r#""DaemonWatchingPod=false,A=true""#,
        DAEMON,
        "POD/containers/0/args/1",
        r#""--feature-gates=DaemonWatchingPod=false,A=true""#,
    ),
    (
        "imagePullSecrets",
        r#"[{"name":"registry"}]"#,
        MANAGER,
        "POD/imagePullSecrets/0/name",
        r#""registry""#,
    ),
    (
        "imagePullSecrets",
        r#"[{"name":"registry"}]"#,
        DAEMON,
        "POD/imagePullSecrets/0/name",
        r#""registry""#,
    ),
    (
        "serviceAccount.annotations",
        r#"{"role":"a"}"#,
        "ServiceAccount/kruise-system/kruise-daemon",
        "/metadata/annotations/role",
        r#""a""#,
    ),
    (
        "serviceAccount.annotations",
        r#"{"role":"a"}"#,
        "ServiceAccount/kruise-system/kruise-webhook",
        "/metadata/annotations/role",
        r#""a""#,
    ),
    ("manager.replicas", "3", MANAGER, "/spec/replicas", "3"),
    ("webhook.replicas", "4", WEBHOOK, "/spec/replicas", "4"),
    (
        "manager.image.repository",
        r#""r.example/m""#,
        WEBHOOK,
        "POD/containers/0/image",
        concat!("\"r.example/m:v", env!("CARGO_PKG_VERSION"), "\""),
    ),
    (
        "manager.image.tag",
        r#""v1""#,
        MANAGER,
        "POD/containers/0/image",
        r#""registry.example/kruise-rs/kruise-manager:v1""#,
    ),
    (
        "manager.image.pullPolicy",
        r#""Always""#,
        MANAGER,
        "POD/containers/0/imagePullPolicy",
        r#""Always""#,
    ),
    (
        "manager.resources",
        r#"{"limits":{"cpu":"1"}}"#,
        MANAGER,
        "POD/containers/0/resources/limits",
        r#"{"cpu":"1","memory":"512Mi"}"#,
    ),
    (
        "webhook.resources",
        r#"{"limits":{"memory":null}}"#,
        WEBHOOK,
        "POD/containers/0/resources/limits",
        "{}",
    ),
    (
        "manager.log.level",
        r#""info,kruise=debug""#,
        MANAGER,
        "POD/containers/0/env/1",
        r#"{"name":"RUST_LOG","value":"info,kruise=debug"}"#,
    ),
    (
        "manager.loggingFormat",
        r#""json""#,
        WEBHOOK,
        "POD/containers/0/args/3",
        r#""--log-format=json""#,
    ),
    (
        "manager.webhook.port",
        "9443",
        WEBHOOK,
        "POD/containers/0/ports/0/containerPort",
        "9443",
    ),
    (
        "manager.webhook.port",
        "9443",
        WEBHOOK,
        "POD/containers/0/env/1",
        r#"{"name":"WEBHOOK_PORT","value":"9443"}"#,
    ),
    (
        "manager.metrics.host",
        r#""""#,
        MANAGER,
        "POD/containers/0/args/2",
        r#""--metrics-addr=:8080""#,
    ),
    (
        "manager.metrics.port",
        "9090",
        MANAGER,
        "POD/containers/0/args/2",
        r#""--metrics-addr=127.0.0.1:9090""#,
    ),
    (
        "manager.metrics.port",
        "9090",
        MANAGER,
        "POD/containers/0/ports/1/containerPort",
        "9090",
    ),
    (
        "secureMetrics.enabled",
        "true",
        MANAGER,
        "POD/containers/0/args/2",
        r#""--metrics-addr=0""#,
    ),
    (
        "secureMetrics.enabled",
        "true",
        WEBHOOK,
        "POD/containers/0/args/3",
        r#""--secure-metrics-addr=:8080""#,
    ),
    (
        "secureMetrics",
        r#"{"enabled":true,"daemonPort":9999}"#,
        DAEMON,
        "POD/containers/0/args/1",
        r#""--secure-metrics-addr=:9999""#,
    ),
    (
        "tracing",
        r#"{"endpoint":"http://c:4318","samplingRatePerMillion":7}"#,
        MANAGER,
        "POD/containers/0/args/3",
        r#""--tracing-endpoint=http://c:4318""#,
    ),
    (
        "tracing",
        r#"{"endpoint":"http://c:4318","samplingRatePerMillion":7}"#,
        DAEMON,
        "POD/containers/0/args/2",
        r#""--tracing-sampling-rate-per-million=7""#,
    ),
    (
        "manager.healthProbe.port",
        "9000",
        MANAGER,
        "POD/containers/0/args/1",
        r#""--health-probe-addr=:9000""#,
    ),
    (
        "manager.healthProbe.port",
        "9000",
        MANAGER,
        "POD/containers/0/ports/0/containerPort",
        "9000",
    ),
    (
        "manager.nodeSelector",
        r#"{"pool":"a"}"#,
        WEBHOOK,
        "POD/nodeSelector",
        r#"{"kubernetes.io/os":"linux","pool":"a"}"#,
    ),
    (
        "manager.tolerations",
        r#"[{"key":"a"}]"#,
        MANAGER,
        "POD/tolerations",
        r#"[{"key":"a"}]"#,
    ),
    (
        "manager.nodeAffinity",
        r#"{"a":1}"#,
        MANAGER,
        "POD/affinity/nodeAffinity",
        r#"{"a":1}"#,
    ),
    ("manager.hostNetwork", "true", WEBHOOK, "POD/hostNetwork", "true"),
    ("manager.hostNetwork", "true", MANAGER, "POD/hostNetwork", "null"),
    // Two Pods cannot have the same ports of a node.
    (
        "manager.hostNetwork",
        "true",
        WEBHOOK,
        "/spec/strategy/rollingUpdate",
        r#"{"maxSurge":0,"maxUnavailable":1}"#,
    ),
    ("manager.hostNetwork", "true", MANAGER, "/spec/strategy", "null"),
    (
        "webhookConfiguration.timeoutSeconds",
        "20",
        "MutatingWebhookConfiguration//kruise-mutating-webhook-configuration",
        "/webhooks/1/timeoutSeconds",
        "20",
    ),
    (
        "webhookConfiguration.timeoutSeconds",
        "20",
        "ValidatingWebhookConfiguration//kruise-validating-webhook-configuration",
        "/webhooks/0/timeoutSeconds",
        "20",
    ),
    (
        "daemon.image.repository",
        r#""r.example/d""#,
        DAEMON,
        "POD/containers/0/image",
        concat!("\"r.example/d:v", env!("CARGO_PKG_VERSION"), "\""),
    ),
    (
        "daemon.image.tag",
        r#""v1@sha256:0""#,
        DAEMON,
        "POD/containers/0/image",
        r#""registry.example/kruise-rs/kruise-daemon:v1@sha256:0""#,
    ),
    (
        "daemon.image.pullPolicy",
        r#""Never""#,
        DAEMON,
        "POD/containers/0/imagePullPolicy",
        r#""Never""#,
    ),
    (
        "daemon.extraEnvs",
        r#"[{"name":"A","value":"b"}]"#,
        DAEMON,
        "POD/containers/0/env/1",
        r#"{"name":"A","value":"b"}"#,
    ),
    (
        "daemon.log.level",
        r#""debug""#,
        DAEMON,
        "POD/containers/0/env/1",
        r#"{"name":"RUST_LOG","value":"debug"}"#,
    ),
    (
        "daemon.host",
        r#""::1""#,
        DAEMON,
        "POD/containers/0/args/0",
        r#""--addr=[::1]:10221""#,
    ),
    (
        "daemon.host",
        r#""::1""#,
        DAEMON,
        "POD/containers/0/livenessProbe/httpGet/host",
        r#""::1""#,
    ),
    (
        "daemon.host",
        r#""""#,
        DAEMON,
        "POD/containers/0/readinessProbe/httpGet/host",
        r#""127.0.0.1""#,
    ),
    (
        "daemon.port",
        "10300",
        DAEMON,
        "POD/containers/0/args/0",
        r#""--addr=127.0.0.1:10300""#,
    ),
    (
        "daemon.port",
        "10300",
        DAEMON,
        "POD/containers/0/livenessProbe/httpGet/port",
        "10300",
    ),
    (
        "daemon.port",
        "10300",
        DAEMON,
        "POD/containers/0/readinessProbe/httpGet/port",
        "10300",
    ),
    (
        "daemon.resources",
        r#"{"limits":{"memory":"1Gi"}}"#,
        DAEMON,
        "POD/containers/0/resources/limits/memory",
        r#""1Gi""#,
    ),
    (
        "daemon.affinity",
        r#"{"nodeAffinity":null}"#,
        DAEMON,
        "POD/affinity",
        "null",
    ),
    (
        "daemon.nodeSelector",
        r#"{"pool":"a"}"#,
        DAEMON,
        "POD/nodeSelector/pool",
        r#""a""#,
    ),
    ("daemon.tolerations", "[]", DAEMON, "POD/tolerations", "null"),
    (
        "daemon.socketLocation",
        r#""/var/run/""#,
        DAEMON,
        "POD/volumes/0/hostPath/path",
        r#""/var/run""#,
    ),
    (
        "daemon.socketLocation",
        r#""/var/run/""#,
        DAEMON,
        "POD/containers/0/volumeMounts/0/mountPath",
        r#""/hostvarrun""#,
    ),
    (
        "daemon.socketFile",
        r#""my.sock""#,
        DAEMON,
        "POD/containers/0/args/1",
        r#""--socket-file=/hostvarrun/containerd/my.sock""#,
    ),
    (
        "daemon.seLinuxOptions",
        r#"{"type":"spc_t","level":"s0:c1"}"#,
        DAEMON,
        "POD/containers/0/securityContext/seLinuxOptions",
        r#"{"type":"spc_t","level":"s0:c1"}"#,
    ),
    (
        "daemon.maxWorkersPerRegistry",
        "2",
        DAEMON,
        "POD/containers/0/args/1",
        r#""--max-workers-per-registry=2""#,
    ),
    (
        "daemon.imagePullStartJitter",
        r#""1m30s""#,
        DAEMON,
        "POD/containers/0/args/1",
        r#""--image-pull-start-jitter=1m30s""#,
    ),
    (
        "daemon.podLabels",
        r#"{"team":"a","control-plane":"b"}"#,
        DAEMON,
        "/spec/template/metadata/labels",
        r#"{"team":"a","control-plane":"daemon"}"#,
    ),
    (
        "daemon.podAnnotations",
        r#"{"a":"b"}"#,
        DAEMON,
        "/spec/template/metadata/annotations",
        r#"{"a":"b"}"#,
    ),
    (
        "daemon.credentialProvider",
        PROVIDER,
        DAEMON,
        "POD/volumes/3/hostPath/path",
        r#""/opt/plugins""#,
    ),
    (
        "daemon.credentialProvider",
        PROVIDER,
        DAEMON,
        "POD/volumes/4/configMap/name",
        r#""plugins""#,
    ),
    (
        "daemon.credentialProvider",
        PROVIDER,
        DAEMON,
        "POD/containers/0/volumeMounts/3/mountPath",
        r#""/kruise/plugins""#,
    ),
    (
        "daemon.credentialProvider",
        PROVIDER,
        DAEMON,
        "POD/containers/0/volumeMounts/4/mountPath",
        r#""/kruise/CredentialProviderPlugin.yaml""#,
    ),
    (
        "daemon.credentialProvider.serviceAccountTokenAudiences",
        r#"["https://r.example/\"a\"","b"]"#,
        "ValidatingAdmissionPolicy//kruise-daemon-tokens",
        "/spec/variables/0/expression",
        r#""[\"https://r.example/\\\"a\\\"\",\"b\"]""#,
    ),
    // Texts that YAML reads as a number or as a map unless they are quoted.
    (
        "daemon.credentialProvider",
        NUMBERS,
        DAEMON,
        "POD/volumes/3/hostPath/path",
        r#""1e6""#,
    ),
    (
        "daemon.credentialProvider",
        NUMBERS,
        DAEMON,
        "POD/volumes/4/configMap/name",
        r#""1e6""#,
    ),
    (
        "tracing",
        r#"{"endpoint":"http://c:","samplingRatePerMillion":7}"#,
        MANAGER,
        "POD/containers/0/args/3",
        r#""--tracing-endpoint=http://c:""#,
    ),
    (
        "tracing",
        r#"{"endpoint":"http://c:","samplingRatePerMillion":7}"#,
        DAEMON,
        "POD/containers/0/args/1",
        r#""--tracing-endpoint=http://c:""#,
    ),
];

const NUMBERS: &str = r#"{"enable":true,"hostPath":"1e6","configmap":"1e6"}"#;
const PROVIDER: &str = r#"{"enable":true,"hostPath":"/opt/plugins","configmap":"plugins"}"#;

/// Values that other tests set: other objects are rendered.
const TESTED_ELSEWHERE: [&str; 4] = [
    "crds.managed",
    "installation.createNamespace",
    "installation.createResourceQuota",
    "installation.namespace",
];

/// Values of OpenKruise's chart without effect, as JSON.
const WITHOUT_EFFECT: [(&str, &str); 7] = [
    ("installation.roleListGroups", r#"["*"]"#),
    ("manager.resyncPeriod", r#""0""#),
    ("manager.pprofAddr", r#""localhost:8090""#),
    ("daemon.pprofAddr", r#""localhost:10222""#),
    ("daemon.credentialProvider.awsCredentialsDir", r#""/etc/aws""#),
    ("externalCerts.annotations", r#"{"a":"b"}"#),
    ("enableKubeCacheMutationDetector", "true"),
];

fn set_json(name: &str, value: &str) -> [String; 2] {
    ["--set-json".into(), format!("{name}={value}")]
}

fn template_with(name: &str, value: &str) -> Result<crate::Objects, String> {
    let [flag, assignment] = set_json(name, value);
    template(&[&flag, &assignment])
}

#[test]
fn each_value_has_its_effect() {
    let default = template(&[]).unwrap();
    for (name, value, object, path, expected) in EFFECTS {
        let path = path.replace("POD", POD);
        let expected: Value = serde_json::from_str(expected).unwrap();
        let rendered = template_with(name, value).unwrap_or_else(|error| panic!("{name}={value}: {error}"));
        let found = rendered[*object].pointer(&path).cloned().unwrap_or_default();
        assert_eq!(found, expected, "{name}={value}: {object} {path}");
        let before = default[*object].pointer(&path).cloned().unwrap_or_default();
        let is_exception = ["manager.hostNetwork", "daemon.host"].contains(name);
        assert!(found != before || is_exception, "{name}={value} changes nothing");
    }
}

#[test]
fn daemon_set_is_left_out_without_its_feature_gate() {
    let with_daemon = template(&[]).unwrap();
    let mut without_daemon = with_daemon.clone();
    without_daemon.remove(DAEMON);
    for gates in [
        "KruiseDaemon=false",
        "AllBeta=false",
        "AllBeta=false,PodWebhook=true",
        "AllBeta=true,KruiseDaemon=false",
        "KruiseDaemon=true,KruiseDaemon=false",
        // As OpenKruise's programs read it, too.
        " PodWebhook=True , AllBeta = False, ",
    ] {
        let rendered = template_with("featureGates", &format!("{gates:?}")).unwrap();
        assert!(rendered.keys().eq(without_daemon.keys()), "{gates}");
        assert!(
            !FeatureGates::parse(gates)
                .unwrap()
                .enabled(FeatureGate::KruiseDaemon)
        );
    }
    for gates in [
        "AllBeta=false,KruiseDaemon=true",
        "KruiseDaemon=true,AllBeta=false",
        "KruiseDaemon=false,KruiseDaemon=true",
        "AllBeta=false, KruiseDaemon=True",
        "AllAlpha=false",
        "NoKruiseDaemon=false",
    ] {
        let rendered = template_with("featureGates", &format!("{gates:?}")).unwrap();
        assert!(rendered.keys().eq(with_daemon.keys()), "{gates}");
        assert!(
            FeatureGates::parse(gates)
                .unwrap()
                .enabled(FeatureGate::KruiseDaemon)
        );
    }
}

/// The message after an installation names no DaemonSet that there is not.
#[test]
fn notes_name_the_daemon_set_with_its_feature_gate_only() {
    let notes = |gates: &str| {
        let home = tempfile::tempdir().unwrap();
        let images = image_values(home.path());
        let mut command = helm_command(home.path());
        let set = format!("featureGates={}", gates.replace(',', "\\,"));
        let install = ["install", "kruise", &chart(), "--dry-run=client"];
        run(command.args(install).args(["--values", &images, "--set", &set])).unwrap()
    };
    let command = "rollout status daemonset/kruise-daemon";
    assert!(notes("").contains(command) && notes("AllBeta=false,KruiseDaemon=true").contains(command));
    assert!(!notes("KruiseDaemon=false").contains(command) && !notes("AllBeta=false").contains(command));
}

#[test]
fn secure_metrics_add_their_roles() {
    let default = template(&[]).unwrap();
    let rendered = template_with("secureMetrics.enabled", "true").unwrap();
    let added = rendered.keys().filter(|key| !default.contains_key(*key));
    assert_eq!(
        added.collect::<Vec<_>>(),
        [
            "ClusterRole//kruise-metrics-reader",
            "ClusterRoleBinding//kruise-metrics-auth-delegator",
            "Role/kruise-system/kruise-metrics-discovery"
        ]
    );
}

#[test]
fn token_audiences_add_the_role_of_the_daemon() {
    let default = template(&[]).unwrap();
    let audiences = "daemon.credentialProvider.serviceAccountTokenAudiences";
    let rendered = template_with(audiences, r#"["registry.example"]"#).unwrap();
    let added = rendered.keys().filter(|key| !default.contains_key(*key));
    assert_eq!(
        added.collect::<Vec<_>>(),
        [
            "ClusterRole//kruise-daemon-tokens",
            "ClusterRoleBinding//kruise-daemon-tokens"
        ]
    );
    assert_eq!(template_with(audiences, "[]").unwrap(), default);
    let of_api_server = template_with(audiences, r#"["https://kubernetes.default.svc"]"#).unwrap_err();
    assert!(
        of_api_server.contains("'/daemon/credentialProvider/serviceAccountTokenAudiences/0'"),
        "{of_api_server}"
    );
}

#[test]
fn values_without_effect_change_nothing() {
    let default = template(&[]).unwrap();
    let levels = [("manager.log.level", "4"), ("daemon.log.level", r#""5""#)];
    for (name, value) in WITHOUT_EFFECT.into_iter().chain(levels) {
        assert_eq!(template_with(name, value).unwrap(), default, "{name}");
    }
}

/// Names of the leaves of `values.yaml`.
fn leaves(values: &Value, prefix: &str, found: &mut BTreeSet<String>) {
    match values.as_object().filter(|map| !map.is_empty()) {
        None => {
            found.insert(prefix.to_owned());
        }
        Some(map) => {
            for (name, value) in map {
                let dot = if prefix.is_empty() { "" } else { "." };
                leaves(value, &format!("{prefix}{dot}{name}"), found);
            }
        }
    }
}

#[test]
fn each_value_is_tested_and_documented() {
    let read = |file: &str| fs::read_to_string(repository("deploy/helm/kruise").join(file)).unwrap();
    let mut names = BTreeSet::new();
    leaves(
        &serde_yaml::from_str(&read("values.yaml")).unwrap(),
        "",
        &mut names,
    );
    assert!(names.len() > 50);
    let readme = read("README.md");
    let tested: Vec<&str> = EFFECTS
        .iter()
        .map(|effect| effect.0)
        .chain(WITHOUT_EFFECT.iter().map(|(name, _)| *name))
        .chain(TESTED_ELSEWHERE)
        .collect();
    for name in names {
        let is_part_of = |whole: &str| name == whole || name.starts_with(&format!("{whole}."));
        let whole = tested.iter().find(|whole| is_part_of(whole));
        let whole = whole.unwrap_or_else(|| panic!("no test sets {name}"));
        let in_readme = [name.as_str(), whole]
            .iter()
            .any(|name| readme.contains(&format!("`{name}`")));
        assert!(in_readme, "README.md has no {name}");
    }
}

/// Value, and what the message names.
const REFUSED: [(&str, &str, &str); 12] = [
    (
        "managr.replicas",
        "2",
        "additional properties 'managr' not allowed",
    ),
    (
        "manager.replica",
        "2",
        "additional properties 'replica' not allowed",
    ),
    (
        "manager.replicas",
        r#""two""#,
        "'/manager/replicas': got string, want integer",
    ),
    ("daemon.port", "70000", "'/daemon/port'"),
    ("featureGates", r#""PodWebhook""#, "'/featureGates'"),
    (
        "installation.namespace",
        r#""Kruise""#,
        "'/installation/namespace'",
    ),
    (
        "webhookConfiguration.timeoutSeconds",
        "60",
        "'/webhookConfiguration/timeoutSeconds'",
    ),
    ("daemon.socketLocation", r#""run""#, "'/daemon/socketLocation'"),
    (
        "daemon.seLinuxOptions",
        r#"{"typ":"spc_t"}"#,
        "additional properties 'typ' not allowed",
    ),
    (
        "daemon.imagePullStartJitter",
        r#""30""#,
        "'/daemon/imagePullStartJitter'",
    ),
    // With which no daemon would start.
    (
        "daemon.imagePullStartJitter",
        r#""301s""#,
        "'/daemon/imagePullStartJitter'",
    ),
    (
        "daemon.credentialProvider.enable",
        "true",
        "'/daemon/credentialProvider/configmap'",
    ),
];

#[test]
fn schema_refuses_wrong_types_and_unknown_names() {
    for (name, value, message) in REFUSED {
        let error = template_with(name, value).unwrap_err();
        assert!(error.contains(message), "{name}={value}: {error}");
    }
}

/// The values of OpenKruise's chart with which it is often installed.
#[test]
fn values_of_openkruise_are_accepted() {
    let values = json!({
        "featureGates": "ImagePullJobGate=true,TemplateNoDefaults=true",
        "installation": { "namespace": "kruise-system", "createNamespace": true },
        "crds": { "managed": true },
        "manager": {
            "log": { "level": "4" }, "replicas": 2, "resyncPeriod": "0", "hostNetwork": false,
            "image": { "repository": "registry.example/kruise-manager", "tag": "v1" },
            "webhook": { "port": 9443 }, "metrics": { "port": 8080 }, "healthProbe": { "port": 8000 },
            "resources": { "limits": { "cpu": "200m", "memory": "512Mi" } },
            "nodeAffinity": {}, "nodeSelector": {}, "tolerations": [], "pprofAddr": "localhost:8090",
        },
        "daemon": {
            "log": { "level": "4" }, "port": 10221, "socketLocation": "/var/run", "socketFile": "", "affinity": {},
            "resources": { "limits": { "cpu": "50m", "memory": "128Mi" }, "requests": { "cpu": 0, "memory": 0 } },
            "credentialProvider": { "enable": false, "hostPath": "credential-provider-plugin" },
        },
        "webhookConfiguration": { "timeoutSeconds": 30 },
        "serviceAccount": { "annotations": {} },
        "externalCerts": { "annotations": {} },
        "imagePullSecrets": [],
    });
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("values.yaml");
    fs::write(&file, serde_yaml::to_string(&values).unwrap()).unwrap();
    let rendered = template(&["--values", file.to_str().unwrap()]).unwrap();
    assert_eq!(rendered.len(), template(&[]).unwrap().len());
}
