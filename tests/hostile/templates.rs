//! Each field of a Pod's and a claim's template, with what should not be in it. The schemas say nothing of these: a sample
//! that has as many fields as fit together says which there are.

use futures::{StreamExt, stream};
use serde_json::{Value, json};

use crate::fields::{AT_A_TIME, Attempt, attempt, hostile, is_named};
use crate::world::{Objects, clone_set, world};

/// Of the values for a type, that many are tried in each place, in turn: every value in some place of its type.
const IN_EACH: usize = 6;

/// Refusals that name neither the field nor what it is in: a part of its path, words of the refusal, and why.
const NAMED_OTHERWISE: &[(&str, &str, &str)] = &[
    ("resources", "quantit", QUANTITY),
    ("divisor", "quantit", QUANTITY),
    ("sizeLimit", "quantit", QUANTITY),
    (
        "metadata.annotations.apps.kruise.io/",
        "Go struct field ObjectMeta.template.metadata.annotations of type string",
        "which of them it is the API server does not say",
    ),
    (
        "metadata.annotations.apps.kruise.io/",
        "annotations: Too long",
        "they are counted together",
    ),
    (
        "terminationGracePeriodSeconds",
        "less than terminationGracePeriodSeconds",
        "a hook would last longer",
    ),
    ("projected.sources[0].", "projected.path: ", PROJECTED),
    ("projected.sources[1].", "downwardAPI.fieldRef", PROJECTED),
    ("projected.sources[1].", "downwardAPI.path: ", PROJECTED),
];

const QUANTITY: &str = "of a quantity that it cannot read the API server does not say where it is";
const PROJECTED: &str = "the API server leaves out which source it is, or which item of that";

/// What stands in the API server's paths of what it cannot read, and in no user's.
const EMBEDDED: [&str; 3] = [".ProbeHandler", ".VolumeSource", ".LocalObjectReference"];

/// Words with all paths as they would be without numbers of items, and with keys of maps after dots.
fn plain(words: &str) -> String {
    let mut plain = String::with_capacity(words.len());
    for (at, part) in words.split('[').enumerate() {
        let inside = part.split_once(']').filter(|_| at > 0);
        match inside {
            Some((item, rest)) if item.parse::<usize>().is_ok() => plain.push_str(rest),
            _ => plain.extend((at > 0).then_some('[').into_iter().chain(part.chars())),
        }
    }
    for embedded in EMBEDDED {
        plain = plain.replace(embedded, "");
    }
    plain
}

/// Whether a refusal names the field of a template, or the object in the template that has it. The API server often says no
/// more, and leaves out numbers of items.
pub fn names(field: &str, words: &str) -> bool {
    let (words, path) = (plain(words), plain(field));
    let path = path.strip_prefix("spec.").unwrap_or(&path);
    let above = path.rsplit_once('.').map(|(above, _)| above);
    let wanted = [Some(path), above.filter(|above| above.matches('.').count() > 1)];
    let mut wanted = wanted.into_iter().flatten();
    let without = |path: &str| path.replacen(".metadata.", ".", 1);
    (path.starts_with("template.") || path.starts_with("volumeClaimTemplates."))
        && (wanted.any(|path| is_named(path, &words) || is_named(&without(path), &words))
            || NAMED_OTHERWISE
                .iter()
                .any(|(part, said, _)| field.contains(part) && words.contains(said)))
}

fn probe(handler: Value) -> Value {
    let mut probe = json!({ "initialDelaySeconds": 1, "timeoutSeconds": 1, "periodSeconds": 1, "successThreshold": 1,
        "failureThreshold": 1, "terminationGracePeriodSeconds": 1 });
    json_patch::merge(&mut probe, &handler);
    probe
}

fn container() -> Value {
    let http = json!({ "httpGet": { "path": "/", "port": 80, "host": "h", "scheme": "HTTP",
        "httpHeaders": [{ "name": "X-A", "value": "b" }] } });
    let exec = json!({ "exec": { "command": ["true"] } });
    let mut readiness = probe(exec.clone());
    readiness["terminationGracePeriodSeconds"] = Value::Null;
    json!({
        "name": "app", "image": "example.com/app:1", "imagePullPolicy": "IfNotPresent",
        "command": ["run"], "args": ["x"], "workingDir": "/w",
        "ports": [{ "name": "web", "containerPort": 80, "hostPort": 80, "protocol": "TCP", "hostIP": "127.0.0.1" }],
        "envFrom": [{ "prefix": "P_", "configMapRef": { "name": "c", "optional": true } }],
        "env": [
            { "name": "KRUISE_CONTAINER_PRIORITY", "value": "1" },
            { "name": "L", "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.labels['tier']" } } },
            { "name": "R", "valueFrom": { "resourceFieldRef": { "containerName": "app", "resource": "limits.cpu",
                "divisor": "1" } } },
            { "name": "S", "valueFrom": { "secretKeyRef": { "name": "s", "key": "k", "optional": true } } },
        ],
        "resources": { "requests": { "cpu": "1", "memory": "1Gi" }, "limits": { "cpu": "1", "memory": "1Gi" } },
        "resizePolicy": [{ "resourceName": "cpu", "restartPolicy": "NotRequired" }],
        "volumeMounts": [{ "name": "data", "mountPath": "/d", "subPath": "s", "readOnly": true,
            "mountPropagation": "None" }],
        "livenessProbe": probe(http), "readinessProbe": readiness,
        "startupProbe": probe(json!({ "tcpSocket": { "port": "web", "host": "h" } })),
        "lifecycle": { "postStart": exec, "preStop": { "sleep": { "seconds": 1 } } },
        "terminationMessagePath": "/m", "terminationMessagePolicy": "File",
        "securityContext": { "runAsUser": 1, "runAsNonRoot": true, "readOnlyRootFilesystem": true,
            "allowPrivilegeEscalation": false, "capabilities": { "add": ["CHOWN"], "drop": ["ALL"] } },
        "stdin": true, "stdinOnce": true, "tty": true,
    })
}

/// A Pod's template.
fn template() -> Value {
    let selector = json!({ "matchLabels": { "tier": "web" },
        "matchExpressions": [{ "key": "tier", "operator": "In", "values": ["web"] }] });
    let terms = json!([{ "labelSelector": selector, "namespaces": ["ns"], "topologyKey": "zone" }]);
    json!({
        "metadata": {
            "labels": { "app": "fields", "tier": "web" },
            "annotations": { "note": "b", "apps.kruise.io/container-launch-priority": "Ordered" },
        },
        "spec": {
            "containers": [container(), { "name": "side", "image": "example.com/side:1" }],
            "initContainers": [{ "name": "init", "image": "example.com/init:1", "restartPolicy": "Always" }],
            "volumes": [
                { "name": "tmp", "emptyDir": { "medium": "Memory", "sizeLimit": "1Gi" } },
                { "name": "config", "configMap": { "name": "c", "defaultMode": 420, "optional": true,
                    "items": [{ "key": "k", "path": "p", "mode": 420 }] } },
                { "name": "all", "projected": { "defaultMode": 420, "sources": [
                    { "serviceAccountToken": { "path": "t", "expirationSeconds": 3600, "audience": "a" } },
                    { "downwardAPI": { "items": [{ "path": "l", "fieldRef": { "fieldPath": "metadata.labels" } }] } }] } },
            ],
            "terminationGracePeriodSeconds": 30, "restartPolicy": "Always", "dnsPolicy": "None",
            "dnsConfig": { "nameservers": ["127.0.0.1"], "searches": ["a.b"], "options": [{ "name": "ndots", "value": "1" }] },
            "hostAliases": [{ "ip": "127.0.0.1", "hostnames": ["a.b"] }],
            "nodeSelector": { "disk": "ssd" }, "nodeName": "nowhere", "schedulerName": "default-scheduler",
            "serviceAccountName": "default", "automountServiceAccountToken": false, "hostname": "h", "subdomain": "s",
            "enableServiceLinks": false, "shareProcessNamespace": true, "priorityClassName": "p",
            "imagePullSecrets": [{ "name": "s" }],
            "readinessGates": [{ "conditionType": "example.com/gate" }],
            "tolerations": [{ "key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute", "tolerationSeconds": 1 }],
            "topologySpreadConstraints": [{ "maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": selector, "minDomains": 1 }],
            "affinity": {
                "nodeAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{ "weight": 1,
                    "preference": { "matchExpressions": [{ "key": "k", "operator": "In", "values": ["v"] }] } }] },
                "podAntiAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": terms },
            },
            "securityContext": { "runAsUser": 1, "fsGroup": 1, "supplementalGroups": [1],
                "seccompProfile": { "type": "RuntimeDefault" }, "sysctls": [{ "name": "kernel.shm_rmid_forced", "value": "1" }] },
        },
    })
}

/// A claim's template.
fn claim() -> Value {
    json!({
        "metadata": { "name": "data", "labels": { "a": "b" }, "annotations": { "a": "b" } },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" }, "limits": { "storage": "2Gi" } },
            "storageClassName": "fast", "volumeMode": "Filesystem", "volumeName": "v",
            "selector": { "matchLabels": { "a": "b" } },
            "dataSource": { "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s" },
        },
    })
}

/// JSON pointers to everything in `value` that is below `at`, each with the field as the API server writes it.
fn places(value: &Value, at: (&str, &str), found: &mut Vec<(String, String)>) {
    let (pointer, field) = at;
    found.push((pointer.to_owned(), field.to_owned()));
    match value {
        Value::Object(fields) => {
            for (key, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
                let pointer = format!("{pointer}/{}", key.replace('~', "~0").replace('/', "~1"));
                places(value, (&pointer, &format!("{field}.{key}")), found);
            }
        }
        Value::Array(items) => {
            for (at, value) in items.iter().enumerate() {
                places(
                    value,
                    (&format!("{pointer}/{at}"), &format!("{field}[{at}]")),
                    found,
                );
            }
        }
        _ => {}
    }
}

/// The name of the value's type, as schemas have it.
fn type_of(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "string",
        Value::Number(_) => "integer",
        Value::Bool(_) => "boolean",
        Value::Array(_) => "array",
        _ => "object",
    }
}

#[tokio::test]
async fn a_template_with_any_value_in_any_field_is_refused_by_field_or_does_no_harm() {
    let world = world().await;
    let admin = &world.admin().await;
    let mut spec = clone_set("fields", 0);
    spec["template"] = template();
    spec["volumeClaimTemplates"] = json!([claim()]);
    let objects = Objects::ours(admin, "v1beta1", "CloneSet");
    let good = json!({ "metadata": { "name": "template-good" }, "spec": spec });
    objects.make(&good).await.unwrap();

    let mut found = Vec::new();
    for (pointer, field) in [
        ("/spec/template", "spec.template"),
        ("/spec/volumeClaimTemplates/0", "spec.volumeClaimTemplates[0]"),
    ] {
        places(good.pointer(pointer).unwrap(), (pointer, field), &mut found);
    }
    let (mut attempts, mut heavy) = (Vec::new(), Vec::new());
    for (at, (pointer, field)) in found.into_iter().enumerate() {
        let schema = json!({ "type": type_of(good.pointer(&pointer).unwrap()) });
        if schema["type"] == "string" {
            let mut object = good.clone();
            *object.pointer_mut(&pointer).unwrap() = "a".repeat(1 << 20).into();
            heavy.push(Attempt {
                version: "v1beta1".to_owned(),
                name: format!("template-heavy-{}", heavy.len()),
                field: field.clone(),
                object,
            });
        }
        let values = hostile(&schema);
        for value in values.iter().cycle().skip(at * IN_EACH).take(IN_EACH) {
            let mut object = good.clone();
            *object.pointer_mut(&pointer).unwrap() = value.clone();
            // Some have Pods, and all whose claims only the manager can be refused.
            let pods = attempts.len() % 8 == 0 || field.starts_with("spec.volumeClaim");
            object["spec"]["replicas"] = json!(i32::from(pods));
            attempts.push(Attempt {
                version: "v1beta1".to_owned(),
                name: format!("template-{}", attempts.len()),
                field: field.clone(),
                object,
            });
        }
    }
    let count = attempts.len();
    let mut accepted = attempt(attempts, AT_A_TIME, admin, "CloneSet").await;
    println!("{} of {count} were accepted", accepted.len());
    assert!(
        accepted.len() > count / 20 && accepted.len() < count / 2,
        "{} of {count} were accepted",
        accepted.len()
    );
    let count = heavy.len();
    assert!(count > 50, "{count} fields are texts");
    let large = attempt(heavy, 1, admin, "CloneSet").await;
    println!("{} of {count} were accepted with 1 MiB", large.len());
    accepted.extend(large);
    world.still_works("after-templates").await;
    accepted.push("template-good".to_owned());
    let removed = stream::iter(&accepted).map(|name| objects.remove(name));
    removed.buffer_unordered(AT_A_TIME).collect::<()>().await;
}
