//! Invalid values in each field of a Pod's and a claim's template. The CRDs do not describe these: a sample has as many
//! fields as fit together, and the API server's own schemas show which it lacks.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::fields::{Attempt, has_type, malformed_values, mentions_field, run_attempts, run_in_parts};
use crate::full_cluster::{MAX_CONCURRENT, Objects, cloneset_spec, exclusive_cluster};

/// Types without a value in the sample, which are tried as a whole and not by field: volumes of one vendor, what must
/// not be written into a template or is removed from it by the API server, what excludes everything else, and what the
/// oldest release does not know or has disabled.
const UNSAMPLED_TYPES: [&str; 30] = [
    "AWSElasticBlockStoreVolumeSource",
    "AzureDiskVolumeSource",
    "AzureFileVolumeSource",
    "CephFSVolumeSource",
    "CinderVolumeSource",
    "FCVolumeSource",
    "FlexVolumeSource",
    "FlockerVolumeSource",
    "GCEPersistentDiskVolumeSource",
    "GitRepoVolumeSource",
    "GlusterfsVolumeSource",
    "ISCSIVolumeSource",
    "PhotonPersistentDiskVolumeSource",
    "PortworxVolumeSource",
    "QuobyteVolumeSource",
    "RBDVolumeSource",
    "ScaleIOVolumeSource",
    "StorageOSVolumeSource",
    "VsphereVirtualDiskVolumeSource",
    "EphemeralContainer",
    "ManagedFieldsEntry",
    "OwnerReference",
    "PersistentVolumeClaimStatus",
    "PodSchedulingGate",
    "TypedObjectReference",
    "WindowsSecurityContextOptions",
    "EvictionResponder",
    "FileKeySelector",
    "PodCertificateProjection",
    "PodSchedulingGroup",
];

/// Rejections that name neither the field nor its parent: part of its path, part of the message, and why.
const OTHER_FIELD_MESSAGES: &[(&str, &str, &str)] = &[
    ("resources", "quantit", QUANTITY_REASON),
    ("divisor", "quantit", QUANTITY_REASON),
    ("sizeLimit", "quantit", QUANTITY_REASON),
    ("overhead", "quantit", QUANTITY_REASON),
    (
        "Timestamp",
        "parsing time",
        "it does not say either where a time is that it cannot read",
    ),
    (
        "containers[0].resources.",
        "must be less than or equal to",
        MISMATCH_REASON,
    ),
    (
        "spec.resourceClaims",
        "must be one of the names in pod.spec.resourceClaims",
        MISMATCH_REASON,
    ),
    ("spec.volumes", ".name: Not found", MISMATCH_REASON),
    (
        "spec.volumeClaimTemplates[0].metadata.name",
        ".name: Not found",
        MISMATCH_REASON,
    ),
    ("spec.hostIPC", "when 'hostIPC' is true", MISMATCH_REASON),
    ("spec.hostPID", "HostPID cannot both be enabled", MISMATCH_REASON),
    (
        ".csi.nodePublishSecretRef.name",
        ".csi.name: ",
        "the API server leaves out the field in between",
    ),
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
    ("projected.sources[0].", "projected.path: ", PROJECTED_REASON),
    ("projected.sources[1].", "downwardAPI.fieldRef", PROJECTED_REASON),
    ("projected.sources[1].", "downwardAPI.path: ", PROJECTED_REASON),
    ("downwardAPI.items[", "downwardAPI.", PROJECTED_REASON),
];

const QUANTITY_REASON: &str = "of a quantity that it cannot read the API server does not say where it is";
const MISMATCH_REASON: &str = "what is said is the other of two that do not fit together";
const PROJECTED_REASON: &str = "the API server leaves out which source it is, or which item of that";

/// Occurs in the API server's paths of what it cannot parse, and in no path that users write.
const EMBEDDED_TYPES: [&str; 3] = [".ProbeHandler", ".VolumeSource", ".LocalObjectReference"];

/// The message with all paths without indexes, and with map keys after dots.
fn normalize_paths(message: &str) -> String {
    let mut plain = String::with_capacity(message.len());
    for (index, part) in message.split('[').enumerate() {
        let inside = part.split_once(']').filter(|_| index > 0);
        match inside {
            Some((item, rest)) if item.parse::<usize>().is_ok() => plain.push_str(rest),
            _ => plain.extend((index > 0).then_some('[').into_iter().chain(part.chars())),
        }
    }
    for embedded in EMBEDDED_TYPES {
        plain = plain.replace(embedded, "");
    }
    plain
}

/// Whether a rejection names the field of a template, or its parent object. The API server often reports no more, and
/// omits indexes.
pub fn names_field(field: &str, message: &str) -> bool {
    let (message, path) = (normalize_paths(message), normalize_paths(field));
    let path = path.strip_prefix("spec.").unwrap_or(&path);
    let above = path.rsplit_once('.').map(|(above, _)| above);
    let candidates = [Some(path), above.filter(|above| above.matches('.').count() > 1)];
    let mut candidates = candidates.into_iter().flatten();
    let without_metadata = |path: &str| path.replacen(".metadata.", ".", 1);
    (path.starts_with("template.") || path.starts_with("volumeClaimTemplates."))
        && (candidates
            .any(|path| mentions_field(path, &message) || mentions_field(&without_metadata(path), &message))
            || OTHER_FIELD_MESSAGES
                .iter()
                .any(|(part, text, _)| field.contains(part) && message.contains(text)))
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
        "envFrom": [{ "prefix": "P_", "configMapRef": { "name": "c", "optional": true } },
            { "secretRef": { "name": "s", "optional": true } }],
        "env": [
            { "name": "KRUISE_CONTAINER_PRIORITY", "value": "1" },
            { "name": "L", "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.labels['tier']" } } },
            { "name": "R", "valueFrom": { "resourceFieldRef": { "containerName": "app", "resource": "limits.cpu",
                "divisor": "1" } } },
            { "name": "C", "valueFrom": { "configMapKeyRef": { "name": "c", "key": "k", "optional": true } } },
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

/// A container with the fields that exclude those of the first.
fn second_container() -> Value {
    json!({
        "name": "side", "image": "example.com/side:1",
        "livenessProbe": probe(json!({ "grpc": { "port": 80, "service": "s" } })),
        "resources": { "claims": [{ "name": "gpu", "request": "r" }] },
        "restartPolicy": "Never",
        "restartPolicyRules": [{ "action": "Restart", "exitCodes": { "operator": "In", "values": [1] } }],
        "volumeDevices": [{ "name": "claimed", "devicePath": "/d" }],
        "lifecycle": { "postStart": { "httpGet": { "port": 80 } }, "preStop": { "exec": { "command": ["true"] } } },
        "securityContext": {
            "privileged": false, "runAsGroup": 1, "procMount": "Default",
            "seLinuxOptions": { "user": "u", "role": "r", "type": "t", "level": "l" },
            "seccompProfile": { "type": "Localhost", "localhostProfile": "p" },
            "appArmorProfile": { "type": "Localhost", "localhostProfile": "p" },
        },
    })
}

/// Volumes of the kinds that are not of one vendor.
fn volumes() -> Value {
    let items = json!([{ "key": "k", "path": "p", "mode": 420 }]);
    let keys = |name| json!({ "name": name, "optional": true, "items": [{ "key": "k", "path": name, "mode": 420 }] });
    let fields = json!([
        { "path": "l", "mode": 420, "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.labels" } },
        { "path": "r", "resourceFieldRef": { "containerName": "app", "resource": "limits.cpu", "divisor": "1" } },
    ]);
    json!([
        { "name": "tmp", "emptyDir": { "medium": "Memory", "sizeLimit": "1Gi" } },
        { "name": "config", "configMap": { "name": "c", "defaultMode": 420, "optional": true, "items": items } },
        { "name": "keys", "secret": { "secretName": "s", "defaultMode": 420, "optional": true, "items": items } },
        { "name": "fields", "downwardAPI": { "defaultMode": 420, "items": fields } },
        { "name": "host", "hostPath": { "path": "/h", "type": "Directory" } },
        { "name": "claimed", "persistentVolumeClaim": { "claimName": "c", "readOnly": true } },
        { "name": "share", "nfs": { "server": "s", "path": "/p", "readOnly": true } },
        { "name": "model", "image": { "reference": "example.com/model:1", "pullPolicy": "Always" } },
        { "name": "driver", "csi": { "driver": "d.example.com", "fsType": "ext4", "readOnly": true,
            "volumeAttributes": { "a": "b" }, "nodePublishSecretRef": { "name": "s" } } },
        { "name": "own", "ephemeral": { "volumeClaimTemplate": {
            "metadata": { "labels": { "a": "b" }, "annotations": { "a": "b" } }, "spec": claim()["spec"] } } },
        { "name": "all", "projected": { "defaultMode": 420, "sources": [
            { "serviceAccountToken": { "path": "t", "expirationSeconds": 3600, "audience": "a" } },
            { "downwardAPI": { "items": [{ "path": "l", "fieldRef": { "fieldPath": "metadata.labels" } }] } },
            { "configMap": keys("c") },
            { "secret": keys("s") },
            { "clusterTrustBundle": { "signerName": "example.com/s", "path": "b", "optional": true,
                "labelSelector": { "matchLabels": { "a": "b" } } } },
        ] } },
    ])
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
            "containers": [container(), second_container()],
            "initContainers": [{ "name": "init", "image": "example.com/init:1", "restartPolicy": "Always" }],
            "volumes": volumes(),
            "resourceClaims": [{ "name": "gpu", "resourceClaimName": "c" }],
            "resources": { "requests": { "cpu": "2" }, "limits": { "cpu": "3" } },
            "terminationGracePeriodSeconds": 30, "restartPolicy": "Always", "dnsPolicy": "None",
            "dnsConfig": { "nameservers": ["127.0.0.1"], "searches": ["a.b"], "options": [{ "name": "ndots", "value": "1" }] },
            "hostAliases": [{ "ip": "127.0.0.1", "hostnames": ["a.b"] }],
            "nodeSelector": { "disk": "ssd" }, "nodeName": "nowhere", "schedulerName": "default-scheduler",
            "serviceAccountName": "default", "automountServiceAccountToken": false, "hostname": "h", "subdomain": "s",
            "enableServiceLinks": false, "os": { "name": "linux" }, "shareProcessNamespace": true, "priorityClassName": "p",
            "imagePullSecrets": [{ "name": "s" }],
            "readinessGates": [{ "conditionType": "example.com/gate" }],
            "tolerations": [{ "key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute", "tolerationSeconds": 1 }],
            "topologySpreadConstraints": [{ "maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": selector, "minDomains": 1 }],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [{ "matchFields": [
                        { "key": "metadata.name", "operator": "In", "values": ["n"] }] }] },
                    "preferredDuringSchedulingIgnoredDuringExecution": [{ "weight": 1,
                    "preference": { "matchExpressions": [{ "key": "k", "operator": "In", "values": ["v"] }] } }],
                },
                "podAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{ "weight": 1, "podAffinityTerm": terms[0] }] },
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

/// A place in the sample.
#[derive(Clone, Debug)]
struct FieldPlace {
    pointer: String,
    /// The field as the API server writes it.
    field: String,
}

impl FieldPlace {
    fn new(pointer: &str, field: &str) -> Self {
        let (pointer, field) = (pointer.to_owned(), field.to_owned());
        Self { pointer, field }
    }

    fn child(&self, key: &str) -> Self {
        let escaped = key.replace('~', "~0").replace('/', "~1");
        Self::new(
            &format!("{}/{escaped}", self.pointer),
            &format!("{}.{key}", self.field),
        )
    }

    fn item(&self, index: usize) -> Self {
        Self::new(
            &format!("{}/{index}", self.pointer),
            &format!("{}[{index}]", self.field),
        )
    }
}

/// The places of a sample, and what it lacks of the API server's schemas.
struct Sample {
    schemas: Value,
    /// Each with its type. A field of a type is there once for each root, however often the sample has it.
    places: Vec<(FieldPlace, Value)>,
    /// Root, type and name of the fields in `places`.
    placed: BTreeSet<String>,
    /// Types with a value in the sample, and their fields that have one.
    sampled: BTreeMap<String, BTreeSet<String>>,
    /// Fields that a value of the sample lacks, by type and name.
    missing: BTreeMap<(String, String), (FieldPlace, Value)>,
}

impl Sample {
    fn resolve_schema<'a>(&'a self, schema: &'a Value) -> (Option<&'a str>, &'a Value) {
        let reference = schema["$ref"]
            .as_str()
            .or_else(|| schema["allOf"][0]["$ref"].as_str());
        let name = reference.and_then(|path| path.rsplit('/').next());
        (name, name.map_or(schema, |name| &self.schemas[name]))
    }

    /// Collects everything in `value`, which is the field `id`, and below it.
    fn collect(&mut self, value: &Value, schema: &Value, place: FieldPlace, id: &str) {
        if self.placed.insert(id.to_owned()) {
            self.places
                .push((place.clone(), json!({ "type": type_of(value) })));
        }
        let (name, resolved) = self.resolve_schema(schema);
        let (name, resolved) = (name.map(str::to_owned), resolved.clone());
        let root = id.split(' ').next().unwrap_or_default();
        let parent = name
            .as_ref()
            .map_or_else(|| id.to_owned(), |name| format!("{root} {name}"));
        match value {
            Value::Object(fields) => {
                let declared = resolved["properties"].as_object();
                for (key, schema) in declared.into_iter().flatten() {
                    let name = name.clone().unwrap_or_default();
                    if fields.get(key).is_some_and(|value| !value.is_null()) {
                        self.sampled.entry(name).or_default().insert(key.clone());
                    } else {
                        let lacking = (place.child(key), schema.clone());
                        self.missing.entry((name, key.clone())).or_insert(lacking);
                    }
                }
                for (key, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
                    let schema = match &resolved["properties"][key] {
                        Value::Null => &resolved["additionalProperties"],
                        schema => schema,
                    };
                    self.collect(value, schema, place.child(key), &format!("{parent}.{key}"));
                }
            }
            Value::Array(items) => {
                for (index, value) in items.iter().enumerate() {
                    self.collect(value, &resolved["items"], place.item(index), &format!("{id}[]"));
                }
            }
            _ => {}
        }
    }

    /// Fields without a value in the sample, each in one possible place, and the types without a value.
    fn missing_fields(&self) -> (Vec<(FieldPlace, Value)>, BTreeSet<String>) {
        let lacking = self.missing.iter().filter(|((name, key), _)| {
            !self
                .sampled
                .get(name)
                .is_some_and(|sampled| sampled.contains(key))
        });
        let mut unsampled = BTreeSet::new();
        let fields = lacking.map(|(_, (place, schema))| {
            let item = if schema["items"].is_object() {
                &schema["items"]
            } else {
                schema
            };
            let (name, resolved) = self.resolve_schema(item);
            if let Some(name) =
                name.filter(|name| resolved["properties"].is_object() && !self.sampled.contains_key(*name))
            {
                unsampled.insert(name.rsplit('.').next().unwrap().to_owned());
            }
            let (_, resolved) = self.resolve_schema(schema);
            let resolved = json!({ "type": resolved["type"].as_str().unwrap_or("string") });
            (place.clone(), resolved)
        });
        let fields = fields.collect();
        (fields, unsampled)
    }
}

/// The type name of the value, as in schemas.
fn type_of(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "string",
        Value::Number(_) => "integer",
        Value::Bool(_) => "boolean",
        Value::Array(_) => "array",
        _ => "object",
    }
}

/// Sets a value in a place whose parent exists.
fn with_value(valid: &Value, place: &FieldPlace, value: Value) -> Value {
    let mut object = valid.clone();
    let (parent, key) = place.pointer.rsplit_once('/').unwrap();
    match object.pointer_mut(&place.pointer) {
        Some(there) => *there = value,
        None => object.pointer_mut(parent).unwrap()[key] = value,
    }
    object
}

#[tokio::test]
async fn malformed_template_fields_are_rejected_or_harmless() {
    let cluster = exclusive_cluster().await;
    let admin = &cluster.admin().await;
    let mut spec = cloneset_spec("fields", 0);
    spec["template"] = template();
    spec["volumeClaimTemplates"] = json!([claim()]);
    let objects = Objects::of_kruise(admin, "v1beta1", "CloneSet");
    let valid = json!({ "metadata": { "name": "template-good" }, "spec": spec });
    objects.create(&valid).await.unwrap();

    let schemas = cluster
        .plane
        .kubectl(&["get", "--raw", "/openapi/v3/api/v1"])
        .unwrap();
    let mut schemas: Value = serde_json::from_str(&schemas).unwrap();
    let mut sample = Sample {
        schemas: schemas["components"]["schemas"].take(),
        places: Vec::new(),
        placed: BTreeSet::new(),
        sampled: BTreeMap::new(),
        missing: BTreeMap::new(),
    };
    for (pointer, field, kind) in [
        ("/spec/template", "spec.template", "PodTemplateSpec"),
        (
            "/spec/volumeClaimTemplates/0",
            "spec.volumeClaimTemplates[0]",
            "PersistentVolumeClaim",
        ),
    ] {
        let schema = json!({ "$ref": format!("#/components/schemas/io.k8s.api.core.v1.{kind}") });
        sample.collect(
            valid.pointer(pointer).unwrap(),
            &schema,
            FieldPlace::new(pointer, field),
            kind,
        );
    }
    let (lacking, unsampled) = sample.missing_fields();
    let unknown: Vec<_> = unsampled
        .iter()
        .filter(|name| !UNSAMPLED_TYPES.contains(&name.as_str()))
        .collect();
    assert!(
        unknown.is_empty(),
        "give the sample a value of these types: {unknown:?}"
    );
    let (mut attempts, mut heavy) = (Vec::new(), Vec::new());
    // Next to a volume with its own claim template, the API server's parse error does not tell whose field it means.
    let mut without_metadata = valid.clone();
    let volumes = without_metadata
        .pointer_mut("/spec/template/spec/volumes")
        .and_then(Value::as_array_mut);
    volumes.unwrap().retain(|volume| volume["ephemeral"].is_null());
    for (index, (place, schema)) in sample.places.iter().chain(&lacking).enumerate() {
        let in_claim = place.field.starts_with("spec.volumeClaim");
        let valid = if in_claim { &without_metadata } else { &valid };
        if schema["type"] == "string" && valid.pointer(&place.pointer).is_some() {
            // A mebibyte takes the API server a second.
            let length = if heavy.len() % 8 == 0 { 1 << 20 } else { 1 << 16 };
            heavy.push(Attempt {
                version: "v1beta1".to_owned(),
                name: format!("template-heavy-{}", heavy.len()),
                field: place.field.clone(),
                object: with_value(valid, place, "a".repeat(length).into()),
            });
        }
        for (value_index, value) in malformed_values(schema).into_iter().enumerate() {
            // All fields of a template take the same way, so each gets some of the values, and fewer of another type,
            // all of which the API server refuses.
            let every = if has_type(schema, &value) { 4 } else { 6 };
            if (index + value_index) % every != 0 {
                continue;
            }
            let mut object = with_value(valid, place, value);
            // Some have Pods, and so have all with claims, which only the manager's requests can get rejected.
            let pods = attempts.len() % 8 == 0 || in_claim;
            object["spec"]["replicas"] = json!(i32::from(pods));
            // The templates are the same in both versions, so each value is tried in one of them.
            let version = ["v1beta1", "v1alpha1"][attempts.len() % 2];
            attempts.push(Attempt {
                version: version.to_owned(),
                name: format!("template-{}", attempts.len()),
                field: place.field.clone(),
                object,
            });
        }
    }
    let count = attempts.len();
    println!(
        "{} places, {} of which are not in the sample, {count} attempts",
        sample.places.len() + lacking.len(),
        lacking.len()
    );
    let (accepted_count, mut accepted) = run_in_parts(attempts, MAX_CONCURRENT, admin, "CloneSet").await;
    println!("{accepted_count} of {count} were accepted");
    assert!(
        accepted_count > count / 20 && accepted_count < count / 2,
        "{accepted_count} of {count} were accepted"
    );
    let count = heavy.len();
    assert!(count > 50, "{count} fields are texts");
    let large = run_attempts(heavy, 2, admin, "CloneSet").await;
    println!("{} of {count} were accepted with long texts", large.len());
    accepted.extend(large);
    cluster.assert_still_works("after-templates").await;
    accepted.push("template-good".to_owned());
    objects.delete_all(&accepted).await;
}
