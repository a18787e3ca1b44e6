//! What the three service accounts may do, and above all what they may not.

use crate::webhook_cluster::shared_cluster;

/// Verb, resource (with subresource or name), namespace ("" for the whole cluster).
type Access = (&'static str, &'static str, &'static str);

const DAEMON_ALLOWED: &[Access] = &[
    ("watch", "nodeimages.apps.kruise.io", ""),
    ("watch", "containerrecreaterequests.apps.kruise.io", ""),
    ("watch", "pods", ""),
    ("patch", "nodeimages.apps.kruise.io/status", ""),
    ("watch", "nodepodprobes.apps.kruise.io", ""),
    ("patch", "nodepodprobes.apps.kruise.io/status", ""),
    (
        "patch",
        "containerrecreaterequests.apps.kruise.io/status",
        "default",
    ),
    ("patch", "pods/status", "default"),
    ("create", "events", "default"),
    ("get", "secrets", "kruise-daemon-config"),
];

const DAEMON_DENIED: &[Access] = &[
    ("list", "secrets", "kruise-daemon-config"),
    ("watch", "secrets", "kruise-daemon-config"),
    ("get", "secrets", "default"),
    ("get", "secrets", "kruise-system"),
    ("patch", "nodeimages.apps.kruise.io", ""),
    ("create", "nodeimages.apps.kruise.io", ""),
    ("patch", "nodepodprobes.apps.kruise.io", ""),
    ("create", "nodepodprobes.apps.kruise.io", ""),
    ("watch", "containerrecreatejobs.apps.kruise.io", ""),
    ("delete", "containerrecreatejobs.apps.kruise.io", "default"),
    ("patch", "containerrecreatejobs.apps.kruise.io/status", "default"),
    ("get", "deployments.apps", "default"),
    ("get", "statefulsets.apps", "default"),
    ("get", "daemonsets.apps", "default"),
    ("list", "replicasets.apps", "default"),
    ("patch", "containerrecreaterequests.apps.kruise.io", "default"),
    ("create", "containerrecreaterequests.apps.kruise.io", "default"),
    ("delete", "containerrecreaterequests.apps.kruise.io", "default"),
    ("patch", "pods", "default"),
    ("create", "containerrecreatejobs.apps.kruise.io", "default"),
    ("patch", "containerrecreatejobs.apps.kruise.io", "default"),
    ("patch", "deployments.apps", "default"),
    ("watch", "deployments.apps", ""),
    ("update", "pods/status", "default"),
    ("patch", "pods/resize", "default"),
    ("create", "pods/exec", "default"),
    ("delete", "pods", "default"),
    ("list", "nodes", ""),
    ("get", "nodeimages.apps.kruise.io/status", ""),
    // Unless the component for credential provider plugins is applied.
    ("get", "serviceaccounts", "default"),
    ("create", "serviceaccounts/token", "default"),
];

const MANAGER_ALLOWED: &[Access] = &[
    ("watch", "sidecarsets.apps.kruise.io", ""),
    ("patch", "sidecarsets.apps.kruise.io/status", ""),
    ("list", "namespaces", ""),
    ("watch", "nodes", ""),
    ("watch", "pods", ""),
    ("patch", "pods/status", "default"),
    ("create", "nodeimages.apps.kruise.io", ""),
    ("patch", "nodeimages.apps.kruise.io", ""),
    ("patch", "nodeimages.apps.kruise.io/status", ""),
    ("delete", "nodeimages.apps.kruise.io", ""),
    ("create", "nodepodprobes.apps.kruise.io", ""),
    ("patch", "nodepodprobes.apps.kruise.io", ""),
    ("delete", "nodepodprobes.apps.kruise.io", ""),
    ("watch", "podprobemarkers.apps.kruise.io", ""),
    ("patch", "podprobemarkers.apps.kruise.io/status", "default"),
    ("patch", "imagepulljobs.apps.kruise.io", "default"),
    ("patch", "imagepulljobs.apps.kruise.io/status", "default"),
    ("delete", "imagepulljobs.apps.kruise.io", "default"),
    ("watch", "imagelistpulljobs.apps.kruise.io", ""),
    ("patch", "imagelistpulljobs.apps.kruise.io/status", "default"),
    ("delete", "imagelistpulljobs.apps.kruise.io", "default"),
    ("patch", "containerrecreaterequests.apps.kruise.io", "default"),
    (
        "patch",
        "containerrecreaterequests.apps.kruise.io/status",
        "default",
    ),
    ("delete", "containerrecreaterequests.apps.kruise.io", "default"),
    ("create", "events", "default"),
    ("get", "secrets", "default"),
    ("watch", "secrets", ""),
    ("create", "secrets", "kruise-daemon-config"),
    ("delete", "secrets", "kruise-daemon-config"),
    ("create", "leases.coordination.k8s.io", "kruise-system"),
    (
        "update",
        "leases.coordination.k8s.io/kruise-manager",
        "kruise-system",
    ),
    (
        "patch",
        "customresourcedefinitions.apiextensions.k8s.io/nodeimages.apps.kruise.io",
        "",
    ),
    ("create", "pods", "default"),
    ("patch", "pods", "default"),
    ("delete", "pods", "default"),
    ("patch", "clonesets.apps.kruise.io/status", "default"),
    ("create", "persistentvolumeclaims", "default"),
    ("create", "controllerrevisions.apps", "default"),
    ("create", "imagepulljobs.apps.kruise.io", "default"),
    ("get", "imagepulljobs.apps.kruise.io", "default"),
    ("create", "containerrecreaterequests.apps.kruise.io", "default"),
    ("watch", "containerrecreaterequests.apps.kruise.io", ""),
    ("get", "containerrecreaterequests.apps.kruise.io", "default"),
    (
        "get",
        "customresourcedefinitions.apiextensions.k8s.io/imagepulljobs.apps.kruise.io",
        "",
    ),
    (
        "patch",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io/kruise-mutating-webhook-configuration",
        "",
    ),
];

const MANAGER_DENIED: &[Access] = &[
    ("get", "namespaces", ""),
    (
        "patch",
        "customresourcedefinitions.apiextensions.k8s.io/imagepulljobs.apps.kruise.io",
        "",
    ),
    (
        "get",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io/kruise-mutating-webhook-configuration",
        "",
    ),
    ("update", "imagepulljobs.apps.kruise.io", "default"),
    ("patch", "nodepodprobes.apps.kruise.io/status", ""),
    ("create", "podprobemarkers.apps.kruise.io", "default"),
    ("delete", "podprobemarkers.apps.kruise.io", "default"),
    ("create", "imagelistpulljobs.apps.kruise.io", "default"),
    ("update", "pods/status", "default"),
    ("update", "containerrecreaterequests.apps.kruise.io", "default"),
    ("create", "secrets", "default"),
    ("update", "secrets", "default"),
    ("delete", "secrets", "default"),
    ("update", "secrets", "kruise-system"),
    ("update", "pods", "default"),
    ("deletecollection", "pods", "default"),
    ("create", "pods/exec", "default"),
    ("delete", "clonesets.apps.kruise.io", "default"),
    ("patch", "nodes", ""),
    ("update", "leases.coordination.k8s.io/other", "kruise-system"),
    ("patch", "customresourcedefinitions.apiextensions.k8s.io", ""),
    (
        "patch",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io",
        "",
    ),
    (
        "create",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io",
        "",
    ),
    ("escalate", "clusterroles.rbac.authorization.k8s.io", ""),
];

const WEBHOOK_ALLOWED: &[Access] = &[
    ("watch", "sidecarsets.apps.kruise.io", ""),
    ("watch", "namespaces", ""),
    ("list", "controllerrevisions.apps", "kruise-system"),
    ("get", "configmaps/kruise-configuration", "kruise-system"),
    ("get", "pods", "default"),
    ("list", "pods", "default"),
    ("list", "persistentvolumeclaims", "default"),
    ("get", "nodes", ""),
    ("watch", "nodes", ""),
    ("create", "podtemplates", "default"),
    ("get", "secrets/kruise-manager-webhook-certs", "kruise-system"),
    ("watch", "secrets/kruise-manager-webhook-certs", "kruise-system"),
];

const WEBHOOK_DENIED: &[Access] = &[
    ("patch", "sidecarsets.apps.kruise.io", ""),
    ("list", "controllerrevisions.apps", "default"),
    ("get", "configmaps", "default"),
    ("watch", "pods", "default"),
    ("create", "persistentvolumeclaims", "default"),
    ("create", "pods", "default"),
    ("patch", "pods", "default"),
    ("delete", "pods", "default"),
    ("update", "podtemplates", "default"),
    ("delete", "podtemplates", "default"),
    ("get", "secrets", "default"),
    ("get", "secrets", "kruise-system"),
    ("list", "secrets", "kruise-daemon-config"),
    ("update", "secrets/kruise-manager-webhook-certs", "kruise-system"),
    ("create", "secrets", "kruise-system"),
    ("create", "events", "default"),
    (
        "get",
        "leases.coordination.k8s.io/kruise-manager",
        "kruise-system",
    ),
    ("get", "configmaps", "default"),
    ("patch", "clonesets.apps.kruise.io", "default"),
    ("list", "clonesets.apps.kruise.io", "default"),
    (
        "patch",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io/kruise-mutating-webhook-configuration",
        "",
    ),
    (
        "patch",
        "customresourcedefinitions.apiextensions.k8s.io/nodeimages.apps.kruise.io",
        "",
    ),
];

fn can_i(account: &str, (verb, resource, namespace): &Access) -> bool {
    let as_user = format!("--as=system:serviceaccount:kruise-system:{account}");
    let mut args = vec!["auth", "can-i", *verb];
    // kubectl takes the part after the slash as a name, and has a flag for subresources; the names here have several
    // words.
    let subresource;
    match resource.rsplit_once('/') {
        Some((resource, sub)) if !sub.contains(['-', '.']) => {
            subresource = format!("--subresource={sub}");
            args.extend([resource, subresource.as_str()]);
        }
        _ => args.push(resource),
    }
    let scope = if namespace.is_empty() {
        "--all-namespaces".into()
    } else {
        format!("--namespace={namespace}")
    };
    args.extend([scope.as_str(), as_user.as_str()]);
    // kubectl exits with an error when the answer is "no".
    shared_cluster()
        .plane
        .kubectl(&args)
        .is_ok_and(|answer| answer.trim() == "yes")
}

fn check_access(account: &str, allowed: &[Access], denied: &[Access]) {
    for access in allowed {
        assert!(can_i(account, access), "{account} may not {access:?}");
    }
    for access in denied {
        assert!(!can_i(account, access), "{account} may {access:?}");
    }
}

#[test]
fn daemon_rbac_is_minimal() {
    check_access("kruise-daemon", DAEMON_ALLOWED, DAEMON_DENIED);
}

#[test]
fn manager_rbac_is_minimal() {
    check_access("kruise-manager", MANAGER_ALLOWED, MANAGER_DENIED);
}

#[test]
fn webhook_rbac_is_minimal() {
    check_access("kruise-webhook", WEBHOOK_ALLOWED, WEBHOOK_DENIED);
}
